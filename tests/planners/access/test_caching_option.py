"""What may be done for prompt caches: who says so, strongest first."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from carpool.core.errors import BadCall, ConfigError
from carpool.core.keys import Profile, VirtualKey
from carpool.core.model import CachingMode
from carpool.frontends.library.fleet import make_options
from carpool.planners.access.options import Options, from_headers, split_path
from carpool.planners.access.read_rules import read_rules
from carpool.planners.access.rules import Facts, RuleBook, decide_rule
from carpool.planners.access.virtual_keys import apply_profile
from carpool.planners.policy import RoutingPolicy

OFF, OBSERVE, PLAN = CachingMode.OFF, CachingMode.OBSERVE, CachingMode.PLAN


def ruled(options: Options, value: object = "plan") -> Options:
    return decide_rule(Facts(), options, RuleBook(read_rules([{"caching": value}], "rules")), 0.0).options


def profiled(client: Options, rules: Options, mode: CachingMode | None) -> CachingMode | None:
    key = VirtualKey("d", "u", "n", "h", "p", "E", "", Profile(caching=mode), 0.0)
    return apply_profile(key, client, rules, 0.0).caching


def test_headers_are_stronger_than_the_path() -> None:
    header, (path, rest) = from_headers((("x-carpool-caching", "Plan"),)), split_path("/@caching=off/v1/messages")
    assert (header.caching, path.caching, rest) == (PLAN, OFF, "/v1/messages")
    assert header.over(path).caching is PLAN
    assert Options().over(path).caching is OFF


def test_the_client_is_stronger_than_a_rule() -> None:
    assert ruled(Options()).caching is PLAN
    assert ruled(Options(caching=OFF)).caching is OFF
    assert ruled(Options(), False).caching is OFF  # YAML parses a bare off as false


@pytest.mark.parametrize(
    ("client", "rule", "mode", "expected"),
    [(OFF, PLAN, PLAN, OFF), (None, PLAN, OBSERVE, OBSERVE), (None, PLAN, None, PLAN), (None, None, None, None)],
)
def test_a_profile_stands_between(client: Any, rule: Any, mode: Any, expected: Any) -> None:
    own = Options(caching=client)
    assert profiled(own, replace(own, caching=client or rule), mode) is expected


@pytest.mark.parametrize("value", ["on", "", "plans"])
def test_what_is_no_mode(value: str) -> None:
    with pytest.raises(BadCall, match="write off, observe or plan"):
        from_headers((("x-carpool-caching", value),))
    with pytest.raises(ConfigError, match="off, observe or plan"):
        ruled(Options(), value)
    with pytest.raises(ConfigError, match="off, observe or plan"):
        RoutingPolicy(caching=value)  # type: ignore[arg-type]


def test_the_library() -> None:
    assert make_options(None, None, None, None, None, None, caching="plan").caching is PLAN
    assert make_options(None, None, None, None, None, None).caching is None
