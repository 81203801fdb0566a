"""The rules that look at one module at a time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from .sources import Module

LONGEST_FUNCTION = 50
LONGEST_MODULE = 500

CLOCKS = {f"time.{name}{unit}" for name in ("time", "monotonic", "perf_counter") for unit in ("", "_ns")}
CLOCKS |= {"time.sleep", "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today"}
CLOCKS |= {"datetime.date.today"}
CLOCK_MODULES = {"carpool.core.clock", "carpool.mock.core.clock", "carpool.sim.timeline"}
SLEEPERS = {"mock", "sim"}

TASKS = {"asyncio.create_task", "asyncio.ensure_future"}
TASK_MODULES = {"carpool.engine.background"}

BROAD = {"Exception", "BaseException"}
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
SECRET_WORDS = {
    *("answer", "answers", "apikey", "authorization", "bodies", "body", "completion", "header", "headers"),
    *("password", "prompt", "prompts", "secret", "secrets"),
}


# Words that once named a dozen things each, and the words to use instead.
FIGURATIVE = {
    "abroad": "the name of the provider",
    "crowd": "queue",
    "crowded": "queue_full",
    "desk": "context",
    "forsaken": "abandoned",
    "hear": "on_event",
    "heard": "on_event",
    "house": "configured",
    "lend": "add or spawn",
    "lender": "lookup",
    "look": "poll or check",
    "looked": "polled or checked",
    "outlet": "receiver",
    "story": "log",
    "tell": "emit, notify or send",
    "tether": "handle",
    "told": "on_done",
    "wish": "options",
}


# ---------------------------------------------------------------- names


def figurative_names(module: Module) -> list[str]:
    if module.component == "mock":
        return []
    return [
        f"{module.name}:{line} {name} has the word {word!r}; the plain one is {FIGURATIVE[word]}."
        for line, name in _defined(module)
        for word in re.findall("[a-z]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower())
        if word in FIGURATIVE
    ]


def _defined(module: Module) -> Iterator[tuple[int, str]]:
    """The names that others see: of classes, functions, parameters, attributes and constants."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        if isinstance(node, ast.ClassDef | ast.Module):
            for statement in node.body:
                targets = statement.targets if isinstance(statement, ast.Assign) else ()
                targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
                yield from ((one.lineno, one.id) for one in targets if isinstance(one, ast.Name))


# ---------------------------------------------------------------- length


def too_long(module: Module) -> list[str]:
    found = [
        f"{module.name}:{node.lineno} {node.name} has {length} lines; {LONGEST_FUNCTION} are the most. Name its steps."
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    lines = len(module.text.splitlines())
    if lines > LONGEST_MODULE:
        found.append(f"{module.name} has {lines} lines; {LONGEST_MODULE} are the most. Split it by idea.")
    return found


# ---------------------------------------------------------------- time and tasks


def banned_clocks(module: Module) -> list[str]:
    if module.name in CLOCK_MODULES:
        return []
    banned = CLOCKS if module.component in SLEEPERS else CLOCKS | {"asyncio.sleep"}
    uses = [(line, name) for line, name in _references(module) if name in banned]
    uses += [(node.lineno, "loop.time") for node in _calls(module) if _on_loop(node, "time")]
    uses = [use for use in uses if use not in _yields(module)]
    return [f"{module.name}:{line} uses {name}: time is a port, take it from the Clock." for line, name in uses]


def _yields(module: Module) -> set[tuple[int, str]]:
    """`asyncio.sleep(0)` reads no clock: it lets others run."""
    origins = _origins(module)
    return {
        (node.func.lineno, "asyncio.sleep")
        for node in _calls(module)
        if _dotted(node.func, origins) == "asyncio.sleep"
        if len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
    }


def bare_tasks(module: Module) -> list[str]:
    if module.name in TASK_MODULES or module.component == "mock":
        return []
    uses = [(line, name) for line, name in _references(module) if name in TASKS]
    uses += [(node.lineno, "loop.create_task") for node in _calls(module) if _on_loop(node, "create_task")]
    return [
        f"{module.name}:{line} uses {name}: a task that nobody holds dies silently; start it through "
        "engine/background.py."
        for line, name in uses
    ]


def _on_loop(call: ast.Call, method: str) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != method:
        return False
    receiver = call.func.value
    if isinstance(receiver, ast.Call):
        receiver = receiver.func
    name = _last(receiver)
    return name == "loop" or name.endswith("_loop")


# ---------------------------------------------------------------- powers


def unbounded_powers(module: Module) -> list[str]:
    """`2 ** failures` overflows some day: an exponent is a constant, or bounded where it stands."""
    return [
        f"{module.name}:{node.lineno} raises 2 to a power without a bound: use core.bounded, or bound it with min()."
        for node in ast.walk(module.tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
        if isinstance(node.left, ast.Constant) and node.left.value == 2
        if not isinstance(node.right, ast.Constant) and not _is_min(node.right)
    ]


def _is_min(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _last(node.func) == "min"


# ---------------------------------------------------------------- swallowing, printing, logging


def swallowed(module: Module) -> list[str]:
    lines = [
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _deals_with(node.body)
    ]
    lines += [
        node.lineno
        for node in _calls(module)
        if _last(node.func) == "suppress" and any(_is_broad(argument) for argument in node.args)
    ]
    return [f"{module.name}:{line} swallows every exception: name the ones you expect, or act on it." for line in lines]


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(one) for one in caught.elts)
    return caught is None or _last(caught) in BROAD


def _deals_with(body: Iterable[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Raise | ast.Call) for statement in body for node in ast.walk(statement))


def prints(module: Module) -> list[str]:
    if module.component in {"cli", "demo"}:
        return []
    return [
        f"{module.name}:{node.lineno} prints: only the command line talks to a terminal."
        for node in _calls(module)
        if isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def logged_secrets(module: Module) -> list[str]:
    return [
        f"{module.name}:{call.lineno} logs `{name}`: bodies, answers, headers and secrets never enter a log."
        for call in _calls(module)
        if _is_log(call)
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]
        for name in _names(argument)
        if _is_secret(name)
    ]


def _is_log(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in LOG_METHODS:
        return False
    return _last(call.func.value).strip("_").lower() in {"log", "logger", "logging"}


def _names(node: ast.AST) -> Iterator[str]:
    """Every variable, attribute and subscript that a value is made of, except those that are only measured."""
    if isinstance(node, ast.Call) and _last(node.func) == "len":
        return
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        yield str(node.slice.value)
    for child in ast.iter_child_nodes(node):
        yield from _names(child)


def _is_secret(name: str) -> bool:
    return "api_key" in name or bool(SECRET_WORDS & set(re.split(r"[^a-z0-9]+", name.lower())))


# ---------------------------------------------------------------- messages


def unsaid(module: Module, family: Iterable[str]) -> list[str]:
    """Messages of carpool's errors are sentences: a capital, a figure or a value first, a full stop or a value last."""
    names = set(family)
    found = []
    for node in ast.walk(module.tree):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and _last(call.func) in names and not _is_sentence(call):
            found.append(
                f"{module.name}:{call.lineno} raises {_last(call.func)} without a sentence that says what to do."
            )
    return found


def _is_sentence(call: ast.Call) -> bool:
    if not call.args:
        return bool(call.keywords)
    message = call.args[0]
    if isinstance(message, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else None for part in message.values]
    elif isinstance(message, ast.Constant):
        parts = [message.value]
    else:
        return True  # made elsewhere
    first, last = (parts[0], parts[-1]) if parts else ("", "")
    return _opens(first) and _closes(last)


def _opens(part: object) -> bool:
    if part is None:
        return True
    first = str(part).split(" ")[0]
    is_name = first == "carpool" or "_" in first or "." in first  # names keep their small letters
    return is_name or bool(first and not first[0].islower())


def _closes(part: object) -> bool:
    return part is None or (isinstance(part, str) and part.endswith((".", "?")))


# ---------------------------------------------------------------- providers

KNOWS_PROVIDERS = {"dialects", "mock", "sim"}
PROVIDER = re.compile(r"anthropic|openai|claude|codex|groq|mistral|azure|grok|\bgpt|x-api-key|sk-ant", re.IGNORECASE)
# Modules outside the dialects that name a provider, and why.
NAMES_PROVIDERS = {
    "carpool.cli.demo": "runs the SDK against the mock",
    "carpool.cli.mock": "the options of the mock",
    "carpool.frontends.library.fast_path": "takes the place of the SDK",
    "carpool.frontends.library.fleet": "has the table of SDKs, `KINDS`",
}


def provider_knowledge(module: Module) -> list[str]:
    """Names and texts of one provider belong into its dialect. Sentences (docstrings, help, messages) are for people,
    and may give examples."""
    if module.component in KNOWS_PROVIDERS or module.name in NAMES_PROVIDERS:
        return []
    texts = [
        (node.lineno, text)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.expr)
        for text in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "value", ""))
        if isinstance(text, str) and " " not in text and PROVIDER.search(text)
    ]
    return [f"{module.name}:{line} knows a provider by {text[:40]!r}: ask the dialect." for line, text in texts]


# ---------------------------------------------------------------- reading code


def _calls(module: Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))


def _references(module: Module) -> Iterator[tuple[int, str]]:
    """Every dotted name in use, by where it came from: `t.time` after `import time as t` is `time.time`."""
    origins = _origins(module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = _dotted(node, origins)
            if name:
                yield node.lineno, name


def _origins(module: Module) -> dict[str, str]:
    origins: dict[str, str] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            origins |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            origins |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return origins


def _dotted(node: ast.AST, origins: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return origins.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, origins)
        return f"{base}.{node.attr}" if base else None
    return None


def _last(node: ast.AST | None) -> str:
    """The last name of a dotted one."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
