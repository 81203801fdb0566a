from __future__ import annotations

from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import ConfigError
from carpool.core.model import Lane
from carpool.core.ports import Dialect, RawRequest
from carpool.core.upstream import Upstream
from carpool.dialects import ANTHROPIC, OPENAI
from carpool.http import Http1Client
from carpool.planners.access.options import Options
from carpool.planners.access.read_rules import MATCHES, glob, read_rules
from carpool.planners.access.rules import Facts, Rule, RuleBook, RuleResult, decide_rule, facts_of

NOON = datetime(2026, 11, 16, 12, 0, tzinfo=ZoneInfo("UTC")).timestamp()  # a Monday
CALL = Facts(
    dialect="anthropic",
    provider="anthropic",
    endpoint="/v1/messages",
    model="claude-haiku-4-5",
    user_agent="claude-cli/2.1.325 (external, sdk-cli)",
    headers={"user-agent": "claude-cli/2.1.325 (external, sdk-cli)", "x-team": "Blue"},
    tags={"team": "CI"},
    streaming=True,
    size=46_000,
)


def book(*rules: dict[str, Any], default: float | None = None, timezone: str = "UTC") -> RuleBook:
    return RuleBook(read_rules(list(rules), "routing.rules", timezone), default)


def ruled(options: Options = Options(), *rules: dict[str, Any], facts: Facts = CALL, **more: Any) -> Options:  # noqa: B008
    return decide_rule(facts, options, book(*rules, **more), NOON).options


def matches(match: dict[str, Any], facts: Facts = CALL, now: float = NOON) -> bool:
    return decide_rule(facts, Options(), book({"match": match, "lane": "now"}), now).rule is not None


def refusal(rules: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read_rules(rules, "routing.rules")
    assert str(caught.value).endswith((".", "?"))
    return str(caught.value)


# ---------------------------------------------------------------- matching


@pytest.mark.parametrize(
    ("match", "fits"),
    [
        ({}, True),
        ({"dialect": "anthropic"}, True),
        ({"dialect": "openai"}, False),
        ({"provider": ["openai", "anthropic"]}, True),
        ({"endpoint": "/v1/mess*"}, True),
        ({"endpoint": "/v1/responses"}, False),
        ({"model": "*haiku*"}, True),
        ({"model": "*Haiku*"}, True),
        ({"model": "claude-*"}, True),
        ({"model": "*-5"}, True),
        ({"model": "claude-?aiku-4-[0-9]"}, True),
        ({"model": "claude"}, False),
        ({"model": ["*opus*", "*sonnet*"]}, False),
        ({"model": "*haiku*", "dialect": "openai"}, False),
        ({"user_agent": "claude-cli/*"}, True),
        ({"user_agent": "codex*"}, False),
        ({"header.x-team": True}, True),
        ({"header.X-Team": "blu*"}, True),
        ({"header.x-team": ["red", "green"]}, False),
        ({"header.x-team": False}, False),
        ({"header.x-other": True}, False),
        ({"header.x-other": False}, True),
        ({"header.x-other": "*"}, False),
        ({"tag.team": "ci"}, True),
        ({"tag.team": True}, True),
        ({"tag.team": "qa"}, False),
        ({"tag.other": "*"}, False),
        ({"tag.other": False}, True),
        ({"streaming": True}, True),
        ({"streaming": False}, False),
        ({"tool_turn": True}, False),
        ({"tool_turn": False}, True),
        ({"subagent": True}, False),
        ({"has_budget": False}, True),
        ({"size": ">45kb"}, True),
        ({"size": ">46kb"}, False),
        ({"size": ">=46kb"}, True),
        ({"size": "<0.1MB"}, True),
        ({"size": "<= 45999"}, False),
        ({"model": None, "dialect": None}, True),
    ],
)
def test_what_a_rule_can_want(match: dict[str, Any], fits: bool) -> None:
    assert matches(match) is fits


@pytest.mark.parametrize(
    ("match", "day", "hour", "fits"),
    [
        ({"between": "09:00-17:00"}, 16, 12.0, True),
        ({"between": "09:00-12:00"}, 16, 12.0, False),
        ({"between": "9:00-12:01"}, 16, 12.0, True),
        ({"between": "22:00-06:00"}, 16, 23.5, True),
        ({"between": "22:00-06:00"}, 16, 5.98, True),
        ({"between": "22:00-06:00"}, 16, 6.0, False),
        ({"between": "20:00-24:00"}, 16, 23.99, True),
        ({"days": "mon"}, 16, 0.0, True),
        ({"days": "mon"}, 15, 23.99, False),
        ({"days": ["tue", "sat-sun"]}, 16, 12.0, False),
        ({"days": "weekdays"}, 20, 12.0, True),
        ({"days": "weekend"}, 21, 12.0, True),
        ({"days": "fri-mon"}, 16, 12.0, True),
        ({"days": "fri-mon"}, 17, 12.0, False),
        # a window belongs to the day on which it begins
        ({"days": "mon", "between": "22:00-06:00"}, 17, 3.0, True),
        ({"days": "mon", "between": "22:00-06:00"}, 16, 3.0, False),
        ({"days": "sun", "between": "22:00-06:00"}, 16, 3.0, True),
        ({"between": "12:30-13:30", "timezone": "Europe/Berlin"}, 16, 12.0, True),
        ({"between": "11:30-12:30", "timezone": "Europe/Berlin"}, 16, 12.0, False),
        ({"between": "05:00-05:01", "timezone": "Asia/Kolkata"}, 15, 23.5, True),
    ],
)
def test_hours_and_days(match: dict[str, Any], day: int, hour: float, fits: bool) -> None:
    then = datetime(2026, 11, day, tzinfo=ZoneInfo("UTC")).timestamp() + hour * 3600
    assert matches(match, now=then) is fits


def test_the_time_zone_follows_the_clock_change() -> None:
    nine_utc_in_summer = datetime(2027, 7, 1, 9, tzinfo=ZoneInfo("UTC")).timestamp()
    nine_utc_in_winter = datetime(2026, 12, 1, 9, tzinfo=ZoneInfo("UTC")).timestamp()
    berlin_eleven = {"between": "11:00-11:30", "timezone": "Europe/Berlin"}
    assert matches(berlin_eleven, now=nine_utc_in_summer)
    assert not matches(berlin_eleven, now=nine_utc_in_winter)


def test_the_common_time_zone_holds_for_rules_that_name_none() -> None:
    rule = {"match": {"between": "13:00-13:01"}, "lane": "now"}
    assert decide_rule(CALL, Options(), book(rule, timezone="Europe/Berlin"), NOON).rule
    assert not decide_rule(CALL, Options(), book(rule), NOON).rule


@pytest.mark.parametrize(
    ("dialect", "header", "known"),
    [
        (ANTHROPIC, "x-claude-code-agent-id", True),
        (ANTHROPIC, "x-claude-code-parent-agent-id", True),
        (ANTHROPIC, "x-claude-code-session-id", False),
        (OPENAI, "x-openai-subagent", True),
    ],
)
def test_subagents_are_known_by_their_headers(dialect: Dialect, header: str, known: bool) -> None:
    upstream = Upstream("here", "http://127.0.0.1:9", dialect, Http1Client())
    path = "/v1/messages" if dialect is ANTHROPIC else "/v1/chat/completions"
    raw = RawRequest("POST", path, "", ((header, "1"),), b'{"model":"m","max_tokens":1,"messages":[]}')
    assert facts_of(upstream, raw, dialect.parse(raw), Options()).subagent == known


@given(
    st.lists(st.text(alphabet="ab*?[]!-.", max_size=8), min_size=1, max_size=3), st.text(alphabet="ab-.", max_size=8)
)
def test_a_glob_means_what_the_shell_means(patterns: list[str], text: str) -> None:
    assert glob(*patterns)(text) is any(fnmatchcase(text, pattern) for pattern in patterns)


# ---------------------------------------------------------------- which rule, and who is stronger


@pytest.mark.parametrize(
    ("match", "steady"),
    [
        ({}, True),
        ({"model": "*haiku*", "tool_turn": True, "header.x-team": "blue", "tag.team": "ci"}, True),
        ({"header.x-team": True}, True),
        ({"size": ">1kb"}, False),
        ({"between": "22:00-06:00"}, False),
        ({"days": "mon"}, False),
        ({"header.content-length": "1*"}, False),
        ({"header.traceparent": True}, False),
    ],
)
def test_what_can_be_remembered_for_the_next_call_of_its_kind(match: dict[str, Any], steady: bool) -> None:
    assert book({"match": match, "lane": "now"}).steady is steady
    assert book({"match": {"model": "x"}, "lane": "now"}, {"match": match, "lane": "now"}).steady is steady


def test_the_first_that_matches_is_the_only_one_that_acts() -> None:
    ruling = decide_rule(
        CALL,
        Options(),
        book(
            {"name": "a", "match": {"model": "gpt*"}, "budget": "1m"},
            {"name": "b", "match": {"model": "claude*"}, "budget": "2m"},
            {"name": "c", "match": {}, "budget": "3m", "tags": {"never": "seen"}},
        ),
        NOON,
    )
    assert (ruling.rule, ruling.options.budget, dict(ruling.options.tags)) == ("b", 120, {})


def test_without_a_match_nothing_changes() -> None:
    asked = Options(budget=60, tags={"a": "b"})
    assert ruled(asked, {"match": {"dialect": "openai"}, "max_budget": "1s"}) is asked


def test_a_rule_gives_a_budget_to_those_that_ask_for_nothing() -> None:
    assert ruled(Options(), {"budget": "8m"}).budget == 480
    assert ruled(Options(budget=60), {"budget": "8m"}).budget == 60
    assert ruled(Options(deadline=NOON + 60), {"budget": "8m"}).until(NOON) == NOON + 60


def test_a_rules_lane_yields_to_a_clients_budget_and_lane() -> None:
    now = {"lane": "now"}
    assert ruled(Options(), now).lane is Lane.NOW
    assert ruled(Options(budget=600), now).lane is None
    assert ruled(Options(lane=Lane.BATCH), now).lane is Lane.BATCH
    assert ruled(Options(lane=Lane.NOW), {"lane": "batch", "budget": "1h"}).lane is Lane.NOW


def test_a_lane_of_a_rule_is_a_wish_and_one_of_a_client_is_not() -> None:
    assert ruled(Options(), {"lane": "batch"}).insists is False
    assert ruled(Options(lane=Lane.BATCH), {"lane": "batch"}).insists is True


def test_a_forced_batch_takes_the_rules_budget() -> None:
    options = ruled(Options(lane=Lane.BATCH), {"budget": "8m"})
    assert (options.lane, options.budget, options.insists) == (Lane.BATCH, 480, True)


def test_tags_are_added_and_the_clients_stand() -> None:
    options = ruled(Options(tags={"a": "client"}), {"tags": {"a": "rule", "b": 2}})
    assert options.tags == {"a": "client", "b": "2"}


def test_on_disconnect() -> None:
    assert ruled(Options(), {"on_disconnect": "cancel"}).on_disconnect == "cancel"
    assert ruled(Options(on_disconnect="keep"), {"on_disconnect": "cancel"}).on_disconnect == "keep"


@pytest.mark.parametrize(
    ("asked", "budget"),
    [
        (Options(budget=3600), 600),
        (Options(budget=600), 600),
        (Options(budget=30), 30),
        (Options(deadline=NOON + 3600), 600),
        (Options(lane=Lane.BATCH), 600),  # it would wait for as long as a batch may take
        (Options(lane=Lane.BATCH, budget=3600), 600),
        (Options(), None),  # it goes at once
    ],
)
def test_a_cap_binds_the_client(asked: Options, budget: float | None) -> None:
    options = ruled(asked, {"name": "cap", "max_budget": "10m"})
    assert options.until(NOON) == (None if budget is None else NOON + budget)
    assert options.lane is asked.lane
    assert bool(options.note) is (asked.until(NOON) != options.until(NOON))


def test_a_cap_leaves_now_alone_and_a_near_deadline_as_it_is() -> None:
    on_now, soon = Options(lane=Lane.NOW, budget=9999), Options(deadline=NOON + 5)
    assert ruled(on_now, {"max_budget": "10m"}) == on_now
    assert ruled(soon, {"max_budget": "10m"}) == soon


@pytest.mark.parametrize(
    "asked", [Options(budget=3600), Options(deadline=NOON + 3600), Options(lane=Lane.BATCH), Options(lane=Lane.FLEX)]
)
def test_a_refused_budget_goes_at_once_and_says_why(asked: Options) -> None:
    options = ruled(asked, {"name": "people", "refuse_budget": "a person waits"}, default=900.0)
    assert (options.lane, options.timed, options.insists) == (Lane.NOW, False, False)
    assert options.note == "The rule people lets no budget of a client through: a person waits."


def test_a_refusal_leaves_alone_what_asks_for_nothing() -> None:
    refuse = {"refuse_budget": True}
    assert ruled(Options(), refuse, default=900.0) == Options()
    assert ruled(Options(lane=Lane.NOW), refuse) == Options(lane=Lane.NOW)


def test_a_rule_may_put_its_own_budget_in_place_of_the_refused_one() -> None:
    options = ruled(Options(budget=86_400), {"refuse_budget": True, "budget": "2m"})
    assert (options.budget, options.lane) == (120, None)
    assert ruled(Options(), {"refuse_budget": True, "budget": "2m"}).budget == 120


def test_the_default_budget_is_the_weakest() -> None:
    assert ruled(Options(), default=60.0).budget == 60
    assert ruled(Options(budget=5), default=60.0).budget == 5
    assert ruled(Options(lane=Lane.NOW), default=60.0).budget is None
    assert ruled(Options(), {"tags": {"a": "b"}}, default=60.0).budget == 60
    assert ruled(Options(), {"lane": "now"}, default=60.0).budget is None
    assert ruled(Options(), {"max_budget": "30s"}, default=60.0).budget == 30


OPTIONS = st.builds(
    Options,
    budget=st.none() | st.floats(0.01, 90_000),
    lane=st.sampled_from([None, Lane.NOW, Lane.BATCH]),
)


@given(OPTIONS, st.integers(1, 7200), st.none() | st.floats(1, 90_000), st.booleans())
def test_nothing_gets_past_a_cap(asked: Options, cap: int, default: float | None, gives: bool) -> None:
    rule = {"max_budget": f"{cap}s"} | ({"budget": f"{cap}s"} if gives else {})
    options = ruled(asked, rule, default=default)
    until = options.until(NOON)
    assert options.lane is Lane.NOW or until is None or until <= NOON + cap
    assert not (options.lane is Lane.BATCH and until is None)


@given(OPTIONS, st.none() | st.floats(1, 90_000))
def test_nothing_gets_past_a_refusal(asked: Options, default: float | None) -> None:
    options = ruled(asked, {"refuse_budget": True}, default=default)
    assert options.lane in (None, Lane.NOW)
    assert options.lane is Lane.NOW or not options.timed


# ---------------------------------------------------------------- explaining


def explained(*rules: dict[str, Any]) -> RuleResult:
    return decide_rule(CALL, Options(), book(*rules), NOON)


def test_the_explanation_walks_the_rules() -> None:
    ruling = explained(
        {"name": "gpt", "match": {"streaming": True, "model": "gpt*"}, "budget": "1m"},
        {"name": "night", "match": {"between": "22:00-06:00"}, "budget": "1m"},
        {"name": "team", "match": {"header.x-team": "blue", "size": ">1kb"}, "budget": "1m"},
        {"name": "rest", "budget": "1m"},
    )
    told = [(one.rule, one.matched, one.because) for one in ruling.explanation()]
    assert told == [
        ("gpt", False, "model is claude-haiku-4-5, and not gpt*"),
        ("night", False, "the time is mon 12:00 in UTC, and not 22:00-06:00"),
        ("team", True, "header.x-team is there, size is 46,000 bytes"),
        ("rest", None, "a rule before it matched"),
    ]
    assert ruling.rule == "team"


def test_the_value_of_a_header_is_never_told() -> None:
    ruling = explained({"match": {"header.x-team": "red"}, "budget": "1m"})
    assert "Blue" not in str(ruling.explanation())
    assert "blue" not in str(ruling.explanation())


def test_a_rule_without_wants_says_so() -> None:
    assert explained({"budget": "1m"}).explanation()[0].because == "it wants nothing in particular"


# ---------------------------------------------------------------- reading


def test_unnamed_rules_are_numbered() -> None:
    assert [rule.name for rule in read_rules([{"lane": "now"}, {"lane": "batch"}], "r")] == ["#1", "#2"]
    assert read_rules(None, "r") == ()


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"a": 1}, "routing.rules must be a list of rules"),
        ("now", "routing.rules must be a list of rules"),
        (["now"], "routing.rules[0] must hold `key: value` pairs, but holds str."),
        ([{"budgt": "8m"}], "routing.rules[0].budgt is not a setting: did you mean routing.rules[0].budget?"),
        ([{"model": "x", "budget": "8m"}], "routing.rules[0].model belongs under `match`: write match: {model: …}."),
        ([{"match": {"model": "x"}}], "routing.rules[0] does nothing: give it budget, task_budget, lane, tags"),
        (
            [{"match": {"modle": "x"}, "lane": "now"}],
            "match.modle is not a setting: did you mean routing.rules[0].match",
        ),
        ([{"match": {"model": 5}, "lane": "now"}], "routing.rules[0].match.model is 5; it must be text"),
        ([{"match": {"model": []}, "lane": "now"}], "match.model is a list; it must be text"),
        ([{"match": {"streaming": "yes"}, "lane": "now"}], "match.streaming is 'yes'; it must be true or false."),
        ([{"match": {"size": "big"}, "lane": "now"}], "match.size is 'big'; it must be a bound"),
        ([{"match": {"size": 100}, "lane": "now"}], "match.size is 100; it must be a bound"),
        ([{"match": {"between": "9-5"}, "lane": "now"}], "match.between is '9-5'; it must be two times of day"),
        ([{"match": {"between": "09:00-09:00"}, "lane": "now"}], "which is no part of a day"),
        ([{"match": {"between": "20:00-24:30"}, "lane": "now"}], "which is no part of a day"),
        ([{"match": {"days": "someday"}, "lane": "now"}], "match.days is 'someday'; it must be days such as"),
        ([{"match": {"days": [1]}, "lane": "now"}], "match.days is a list; it must be days such as"),
        ([{"match": {"timezone": "Mars/North", "days": "mon"}, "lane": "now"}], "match.timezone is 'Mars/North'; it"),
        ([{"match": {"timezone": "../etc/passwd"}, "lane": "now"}], "it must be a time zone"),
        ([{"match": {"header.authorization": "x"}, "lane": "now"}], "holds a secret, which a rule may not read"),
        ([{"match": {"header.X-Api-Key": True}, "lane": "now"}], "holds a secret"),
        ([{"match": {"header.": True}, "lane": "now"}], "is not a setting"),
        ([{"match": {"header": True}, "lane": "now"}], "did you mean routing.rules[0].match.header.NAME?"),
        ([{"lane": "flex"}], "routing.rules[0].lane is 'flex'; it must be now or batch."),
        ([{"budget": "soon"}], "routing.rules[0].budget is 'soon'; it must be a budget up to 30 days"),
        ([{"budget": True}], "routing.rules[0].budget is True"),
        ([{"budget": 0}], "routing.rules[0].budget is 0"),
        ([{"max_budget": "31d"}], "routing.rules[0].max_budget is '31d'"),
        ([{"on_disconnect": "drop"}], "it must be keep or cancel."),
        ([{"tags": ["a"]}], "routing.rules[0].tags must hold `key: value` pairs"),
        ([{"tags": {"a": "b\nc"}}], "routing.rules[0].tags.a is 'b\\nc'; it must be one line"),
        ([{"refuse_budget": "a\r\nb: c"}], "it must be one line of text"),
        ([{"refuse_budget": 3}], "routing.rules[0].refuse_budget is 3; it must be one line"),
        ([{"name": "a\nb", "lane": "now"}], "it must be a name"),
        ([{"name": "", "lane": "now"}], "routing.rules[0].name is ''"),
        ([{"refuse_budget": True, "max_budget": "1m"}], "has refuse_budget and max_budget"),
        ([{"budget": "2m", "max_budget": "1m"}], "budget is more than routing.rules[0].max_budget"),
        ([{"lane": "now", "budget": "1m"}], "has `lane: now` and a budget"),
        ([{"lane": "now", "task_budget": "1h"}], "has `lane: now` and a budget"),
        ([{"task_budget": "soon"}], "routing.rules[0].task_budget is 'soon'; it must be a budget up to 30 days"),
        ([{"name": "a", "lane": "now"}, {"name": "a", "lane": "now"}], "routing.rules[1].name is 'a', as"),
    ],
)
def test_a_bad_rule_is_refused_in_a_sentence(rules: object, told: str) -> None:
    assert told in refusal(rules)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["name", "match", "budget", "lane", "tags", "max_budget", "refuse_budget", "on_disconnect"])
WANTS = st.dictionaries(st.sampled_from([*MATCHES, "header.x-a", "tag.b"]), JUNK, max_size=3)


def read_or_refused(rules: list[Any]) -> tuple[tuple[Rule, ...] | None, str]:
    try:
        return read_rules(rules, "routing.rules"), ""
    except ConfigError as error:
        return None, str(error)


@given(st.lists(st.dictionaries(KEYS, JUNK | WANTS, max_size=4), max_size=3))
def test_any_rules_are_read_or_refused_in_a_sentence(rules: list[Any]) -> None:
    found, said = read_or_refused(rules)
    if found is None:
        assert said.endswith((".", "?"))
        assert len(said) < 1000
    else:
        ruling = decide_rule(CALL, Options(budget=60), RuleBook(found), NOON)
        assert len(ruling.explanation()) == len(found)


# ---------------------------------------------------------------- tasks


def test_a_rule_gives_a_task_its_budget() -> None:
    found = ruled(Options(), {"name": "all", "task_budget": "3h"})
    assert (found.task_budget, found.budget, found.lane) == (10_800.0, None, None)
    assert found.note == "The rule all gives its task a budget."
    both = ruled(Options(), {"task_budget": "3h", "budget": "10m"})
    assert (both.task_budget, both.budget) == (10_800.0, 600.0)


def test_a_rule_gives_no_task_budget_to_who_has_one_or_goes_at_once() -> None:
    rule = {"task_budget": "3h", "budget": "10m"}
    own = ruled(Options(task_budget=60.0), rule)
    assert (own.task_budget, own.budget) == (60.0, None)
    assert ruled(Options(task_deadline=NOON), rule).task_budget is None
    assert ruled(Options(lane=Lane.NOW), rule).task_budget is None
    assert ruled(Options(budget=60.0), rule).task_budget == 10_800.0  # the earlier deadline counts


def test_a_default_budget_is_not_for_who_has_time_for_a_task() -> None:
    assert ruled(Options(task_budget=60.0), default=600.0).budget is None


def test_a_refused_budget_is_refused_for_the_task_too() -> None:
    for options in (Options(task_budget=60.0), Options(task_deadline=NOON), Options(task="essay")):
        found = ruled(options, {"name": "people", "refuse_budget": "a person waits"})
        assert (found.task_budget, found.task_deadline, found.lane) == (None, None, Lane.NOW)
        assert found.note == "The rule people lets no budget of a client through: a person waits."
    own = ruled(Options(task_budget=60.0), {"refuse_budget": True, "task_budget": "1h"})
    assert (own.task_budget, own.lane) == (3600.0, None)
