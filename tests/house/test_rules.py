from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from carpool.core import errors

from . import rules
from .sources import Module, modules

Checker = Callable[[Module], list[str]]
FAMILY = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, errors.CarpoolError)}
sentences: Checker = partial(rules.unsaid, family=FAMILY)

RULES = {
    "too_long": rules.too_long,
    "figurative_names": rules.figurative_names,
    "banned_clocks": rules.banned_clocks,
    "bare_tasks": rules.bare_tasks,
    "unbounded_powers": rules.unbounded_powers,
    "swallowed": rules.swallowed,
    "prints": rules.prints,
    "logged_secrets": rules.logged_secrets,
    "sentences": sentences,
    "provider_knowledge": rules.provider_knowledge,
}


@pytest.mark.parametrize("rule", RULES)
def test_carpool(rule: str) -> None:
    broken = [sentence for module in modules() for sentence in RULES[rule](module)]
    assert not broken, "\n".join(broken)


def snippet(text: str, name: str = "carpool.engine.driver") -> Module:
    return Module(name, text)


BAD: list[tuple[str, str]] = [
    ("too_long", "def f():\n" + "    x = 1\n" * 50),
    ("too_long", "class C:\n    async def f(self):\n" + "        x = 1\n" * 50),
    ("too_long", "x = 1\n" * 501),
    ("figurative_names", "class HouseKeys:\n    pass"),
    ("figurative_names", "def f(lender: object) -> None: ..."),
    ("figurative_names", "LOOK_S = 1.0"),
    ("figurative_names", "self._outlet = receiver"),
    ("banned_clocks", "import time\nnow = time.time()"),
    ("banned_clocks", "import time as t\nnow = t.monotonic"),
    ("banned_clocks", "from time import perf_counter_ns as tick\ntick()"),
    ("banned_clocks", "import time\ntime.sleep(1)"),
    ("banned_clocks", "from datetime import UTC, datetime\ndatetime.now(UTC)"),
    ("banned_clocks", "import datetime as dt\ndt.datetime.utcnow()"),
    ("banned_clocks", "from datetime import date\ndate.today()"),
    ("banned_clocks", "import asyncio\nasyncio.get_running_loop().time()"),
    ("banned_clocks", "def f(self):\n    return self._loop.time()"),
    ("banned_clocks", "import asyncio\nasync def f():\n    await asyncio.sleep(0.1)"),
    ("bare_tasks", "import asyncio\nasyncio.create_task(f())"),
    ("bare_tasks", "from asyncio import ensure_future\nensure_future(f())"),
    ("bare_tasks", "loop.create_task(f())"),
    ("unbounded_powers", "pause = min(0.5 * 2 ** (failures - 1), 30.0)"),
    ("unbounded_powers", "pause = 2.0**failures"),
    ("provider_knowledge", "from carpool.dialects import OPENAI\nif dialect is OPENAI:\n    pass"),
    ("provider_knowledge", "path = 'x' if model.startswith('claude-') else 'y'"),
    ("provider_knowledge", "header = f'{x}anthropic-version'"),
    ("swallowed", "try:\n    f()\nexcept Exception:\n    pass"),
    ("swallowed", "try:\n    f()\nexcept:\n    ..."),
    ("swallowed", "for x in y:\n    try:\n        f()\n    except (ValueError, BaseException):\n        continue"),
    ("swallowed", "def f():\n    try:\n        g()\n    except Exception:\n        return None"),
    ("swallowed", "import contextlib\nwith contextlib.suppress(Exception):\n    f()"),
    ("prints", "print('hello')"),
    ("logged_secrets", "log.info('sent %s', body)"),
    ("logged_secrets", "logger.debug(f'sent {call.body}')"),
    ("logged_secrets", "self._log.warning('refused', extra={'key': request.headers})"),
    ("logged_secrets", "import logging\nlogging.error('bad %s', row['authorization'])"),
    ("logged_secrets", "log.exception('bad %s', client_secret)"),
    ("logged_secrets", "log.info('bad %s', anthropic_api_key)"),
    ("sentences", "raise BadCall('no model')"),
    ("sentences", "raise errors.ConfigError('The port is wrong')"),
    ("sentences", "raise StoreLocked()"),
    ("sentences", "raise Closed(f'closed since {when}.')"),
]


@pytest.mark.parametrize(("rule", "text"), BAD)
def test_a_bad_snippet_is_found(rule: str, text: str) -> None:
    found = RULES[rule](snippet(text))
    assert len(found) == 1
    assert found[0].startswith("carpool.engine.driver")
    assert found[0].endswith(".")


GOOD: list[tuple[str, Module]] = [
    ("too_long", snippet("def f():\n" + "    x = 1\n" * 49)),
    ("figurative_names", snippet("def lookup(key):\n    told = key")),
    ("figurative_names", snippet("def tell(url): ...", "carpool.mock.core.provider")),
    ("banned_clocks", snippet("import time\nnow = time.time", "carpool.core.clock")),
    ("banned_clocks", snippet("import time\nnow = time.time", "carpool.mock.core.clock")),
    ("banned_clocks", snippet("import asyncio\nasyncio.sleep(1)", "carpool.mock.core.app")),
    ("banned_clocks", snippet("import asyncio\nasyncio.sleep(0)")),
    ("banned_clocks", snippet("from datetime import UTC, datetime\ndatetime.fromtimestamp(clock.now(), UTC)")),
    ("banned_clocks", snippet("call.time()")),
    ("bare_tasks", snippet("import asyncio\nasyncio.create_task(f())", "carpool.engine.background")),
    ("bare_tasks", snippet("import asyncio\nasyncio.create_task(f())", "carpool.mock.core.app")),
    ("bare_tasks", snippet("async with asyncio.TaskGroup() as group:\n    group.create_task(f())")),
    ("unbounded_powers", snippet("pause = 2 ** min(failures, 10)")),
    ("unbounded_powers", snippet("most = 2**63 - 1")),
    ("swallowed", snippet("try:\n    f()\nexcept Exception:\n    log.exception('The hook failed.')")),
    ("swallowed", snippet("try:\n    f()\nexcept OSError:\n    pass")),
    (
        "swallowed",
        snippet("try:\n    f()\nexcept Exception as error:\n    raise MalformedResponse(str(error)) from error"),
    ),
    ("provider_knowledge", snippet("'''A path such as Anthropic's.'''\nheader = dialect.key_headers[0]")),
    ("provider_knowledge", snippet("header = 'anthropic-version'", "carpool.dialects.anthropic.parse")),
    ("prints", snippet("print('hello')", "carpool.cli.stats")),
    ("logged_secrets", snippet("log.info('sent %d bytes of %s', len(call.body), call.ticket)")),
    ("logged_secrets", snippet("store.log(body)")),
    ("sentences", snippet("raise BadCall(f'{name!r} is not a model: see the list.')")),
    ("sentences", snippet("raise BadCall(message)")),
    ("sentences", snippet("raise ConfigError(f'batch_min_size is {low}: give at most {high}.')")),
    ("sentences", snippet("raise BadCall('carpool can\\'t send this: give it a client.')")),
    ("sentences", snippet("raise KeyError('model')")),
]


@pytest.mark.parametrize(("rule", "module"), GOOD)
def test_a_good_snippet_is_left_alone(rule: str, module: Module) -> None:
    assert RULES[rule](module) == []
