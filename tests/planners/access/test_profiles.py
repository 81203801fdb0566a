"""What a key's profile makes of a call: the client can ask for less, and never for more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import KeyForbidden
from carpool.core.keys import Profile, VirtualKey
from carpool.core.model import Lane
from carpool.planners.access.options import Options
from carpool.planners.access.rules import Facts, Rule, RuleBook, decide_rule
from carpool.planners.access.virtual_keys import apply_profile, within_profile

NOW = 1_800_000_000.0


def key(**profile: object) -> VirtualKey:
    return VirtualKey("d", "u", "ci", "abcd", "anthropic", "KEY", "", Profile(**profile), NOW)  # type: ignore[arg-type]


def through(one: VirtualKey, options: Options, *rules: Rule) -> Options:
    """As the proxy does it: what the client asks for, the rules, the profile."""
    client = within_profile(one, options)
    ruled = decide_rule(Facts(tags=client.tags, has_budget=client.timed), client, RuleBook(rules), NOW).options
    return apply_profile(one, client, ruled, NOW)


def test_without_a_word_the_profile_speaks():
    found = through(key(budget=600.0), Options())
    assert (found.budget, found.lane) == (600.0, None)
    found = through(key(lane=Lane.BATCH), Options())
    assert (found.budget, found.lane, found.insists) == (None, Lane.BATCH, False)
    assert "The key ci" in found.note


def test_the_profile_is_stronger_than_the_rules():
    rule = Rule("all", budget=60.0, lane=Lane.NOW)
    found = through(key(budget=600.0), Options(), rule)
    assert (found.budget, found.lane) == (600.0, None)
    found = through(key(lane=Lane.BATCH), Options(), Rule("strict", refuse_budget=True))
    assert found.lane is Lane.BATCH


def test_the_client_is_stronger_than_the_profile():
    found = through(key(budget=600.0, lane=Lane.BATCH), Options(budget=30.0))
    assert (found.budget, found.lane) == (30.0, None)
    found = through(key(budget=600.0), Options(lane=Lane.NOW))
    assert (found.budget, found.lane) == (None, Lane.NOW)
    found = through(key(budget=600.0), Options(lane=Lane.BATCH))
    assert (found.budget, found.lane) == (600.0, Lane.BATCH)


def test_without_a_profile_the_rules_speak():
    found = through(key(tags={"team": "ci"}), Options(), Rule("all", budget=60.0, tags={"rule": "1"}))
    assert (found.budget, found.tags) == (60.0, {"rule": "1", "team": "ci"})


def test_bound_tags_win_over_the_clients_and_over_those_of_rules():
    one = key(tags={"team": "ci"})
    found = through(one, Options(tags={"team": "boss", "job": "7"}), Rule("all", tags={"team": "house"}))
    assert found.tags == {"team": "ci", "job": "7"}


def test_a_rule_that_asks_for_a_bound_tag_meets_it():
    assert within_profile(key(tags={"team": "ci"}), Options(tags={"team": "boss"})).tags == {"team": "ci"}


def test_a_budget_over_the_cap_is_cut():
    found = through(key(max_budget=3600.0), Options(budget=7200.0))
    assert found.budget == 3600.0
    assert "at most 60 min" in found.note
    assert through(key(max_budget=3600.0), Options(lane=Lane.BATCH)).budget == 3600.0
    assert through(key(max_budget=60.0), Options(), Rule("all", budget=600.0)).budget == 60.0
    assert through(key(max_budget=60.0), Options()).budget is None  # it goes at once


def test_or_refused_where_the_key_says_so():
    one = key(max_budget=3600.0, refuse_over=True)
    with pytest.raises(KeyForbidden, match="at most 60 min, and this call asks for 2 h"):
        through(one, Options(budget=7200.0))
    assert through(one, Options(budget=3600.0)).budget == 3600.0


def test_lanes_that_the_key_has_not_are_refused():
    with pytest.raises(KeyForbidden, match="may not take the lane batch: it has now"):
        through(key(lanes=(Lane.NOW,)), Options(lane=Lane.BATCH))
    with pytest.raises(KeyForbidden, match="may not take the lane now: it has batch"):
        through(key(lanes=(Lane.BATCH,)), Options(lane=Lane.NOW))


def test_a_key_without_now_travels_by_batch_whatever_else_says():
    for options in (Options(), Options(budget=1.0), Options(lane=Lane.BATCH)):
        found = through(key(lanes=(Lane.BATCH,)), options, Rule("all", lane=Lane.NOW))
        assert (found.lane, found.insists) == (Lane.BATCH, True)


def test_a_key_without_batch_travels_on_now():
    for options in (Options(), Options(budget=600.0)):
        found = through(key(lanes=(Lane.NOW,)), options, Rule("all", lane=Lane.BATCH))
        assert found.lane is Lane.NOW or (found.lane is None and not found.timed)


def test_another_provider_is_refused():
    with pytest.raises(KeyForbidden, match="buys from anthropic only"):
        within_profile(key(), Options(provider="openai"))
    assert within_profile(key(), Options(provider="anthropic")).provider == "anthropic"


budgets = st.one_of(st.none(), st.floats(0.001, 90_000.0))
lanes = st.sampled_from([None, Lane.NOW, Lane.BATCH])
tags = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), max_size=3)


@given(
    options=st.builds(Options, budget=budgets, lane=lanes, tags=tags),
    rule=st.builds(Rule, name=st.just("r"), budget=budgets, lane=lanes, tags=tags, max_budget=budgets),
    most=budgets,
    default=lanes,
    budget=budgets,
    allowed=st.sampled_from([(), (Lane.NOW,), (Lane.BATCH,), (Lane.NOW, Lane.BATCH)]),
    bound=tags,
)
def test_nothing_a_client_or_a_rule_says_leads_past_the_bounds(options, rule, most, default, budget, allowed, bound):
    one = key(budget=budget, lane=default, max_budget=most, lanes=allowed, tags=bound)
    try:
        found = through(one, options, rule)
    except KeyForbidden:
        assert options.lane is not None
        assert allowed
        assert options.lane not in allowed
        return
    assert found.tags.items() >= bound.items()
    if allowed == (Lane.BATCH,):
        assert found.lane is Lane.BATCH
        assert found.insists
    elif allowed == (Lane.NOW,):
        assert found.lane is Lane.NOW or (found.lane is None and not found.timed)
    if most is not None and found.lane is not Lane.NOW and (found.timed or found.lane is Lane.BATCH):
        assert found.until(NOW) is not None
        assert found.until(NOW) <= NOW + most


def test_a_profile_gives_a_task_its_budget():
    found = through(key(task_budget=3600.0), Options())
    assert (found.task_budget, found.note) == (3600.0, "The key ci gives its task a budget.")
    assert through(key(task_budget=3600.0), Options(), Rule("all", task_budget=60.0)).task_budget == 3600.0
    assert through(key(task_budget=3600.0), Options(task_budget=60.0)).task_budget == 60.0
    assert through(key(task_budget=3600.0), Options(lane=Lane.NOW)).task_budget is None
    assert through(key(budget=600.0), Options(task_budget=60.0)).budget is None  # its client gave its turns more time


def test_a_key_without_batches_has_no_use_for_a_task_budget():
    found = through(key(lanes=(Lane.NOW,)), Options(task_budget=60.0))
    assert (found.lane, found.insists) == (Lane.NOW, False)


def test_the_cap_of_a_profile_is_for_a_turn():
    found = through(key(max_budget=60.0, refuse_over=True), Options(task_budget=3600.0))
    assert (found.task_budget, found.longest) == (3600.0, 60.0)
