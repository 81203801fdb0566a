from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import BadCall, ConfigError
from carpool.planners.policy import RoutingPolicy, parse_budget

TEMPLATE = """
routing: {sync_latency_cap_ms: 5000, batch_window_ms: 30000, min_batch_size: 10, max_batch_size: 100, poll_interval_s: 1.0}
token_budgets: {max_input_tokens_per_request: 40000, enforce_pre_queue_validation: true}
observability: {metrics_prefix: "llm.fleet", track_sync_batch_split: true, alert_on_batch_failure_rate: 0.05}
"""  # noqa: E501

WHOLE_CONFIG = """
providers:
  anthropic: {dialect: anthropic, base_url: "https://api.anthropic.com", api_key_env: ANTHROPIC_API_KEY}
routing:   {default_budget: null, sync_latency_cap_ms: 5000, rules: [{match: {subagent: true}, budget: 8m}]}
batching:  {rpm: 50, linger_ms: 250, batch_window_ms: 30000, min_batch_size: 1, max_batch_size: 100000, poll_interval_s: 2}
caching:   {mode: observe}
limits:    {max_input_tokens_per_request: null, enforce_pre_queue_validation: false, max_body_mb: 32, max_waiting_calls: 9}
budgets:   [{match: {tag.team: ci}, usd_per_day: 50, on_limit: reject}]
observability: {metrics_prefix: carpool, track_sync_batch_split: true, otlp_endpoint: null, alert_on_batch_failure_rate: 0.05}
store: {url: "sqlite:///carpool.db", retain_days: 3}
"""  # noqa: E501


def from_text(tmp_path: Path, text: str) -> RoutingPolicy:
    path = tmp_path / "carpool.yaml"
    path.write_text(text, encoding="utf-8")
    return RoutingPolicy.from_yaml(path)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        from_text(tmp_path, text)
    assert str(tmp_path / "carpool.yaml") in str(caught.value)
    return str(caught.value)


def test_unset_is_none_and_stays_distinct_from_set() -> None:
    policy = RoutingPolicy()
    assert policy.batch_window_ms is None
    assert policy.batch_min_size is None
    assert RoutingPolicy(batch_window_ms=0).batch_window_ms == 0


def test_the_template_as_it_stands(tmp_path: Path) -> None:
    assert from_text(tmp_path, TEMPLATE) == RoutingPolicy(
        sync_max_latency_ms=5000,
        batch_window_ms=30000,
        batch_min_size=10,
        batch_max_size=100,
        poll_interval_s=1.0,
        max_input_tokens=40000,
        enforce_pre_queue_validation=True,
        metrics_prefix="llm.fleet",
        track_sync_batch_split=True,
        alert_on_batch_failure_rate=0.05,
    )


def test_the_whole_config_and_what_is_others_business(tmp_path: Path) -> None:
    policy = from_text(tmp_path, WHOLE_CONFIG)
    assert policy.batch_rpm == 50
    assert policy.linger_ms == 250
    assert policy.max_input_tokens is None
    assert policy.enforce_pre_queue_validation is False
    assert policy.max_waiting_calls == 9
    assert policy.retain_days == 3


@pytest.mark.parametrize("text", ["", "routing:\n", "routing: {min_batch_size: null}"])
def test_nothing_set_means_the_defaults(tmp_path: Path, text: str) -> None:
    assert from_text(tmp_path, text) == RoutingPolicy()


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"sync_max_latency_ms": -1}, "from 0 to"),
        ({"sync_max_latency_ms": float("nan")}, "from 0 to"),
        ({"batch_window_ms": float("inf")}, "from 0 to 86400000"),
        ({"batch_min_size": 0}, "a whole number from 1 to"),
        ({"batch_min_size": 2.5}, "a whole number from 1 to"),
        ({"batch_min_size": True}, "a whole number from 1 to"),
        ({"batch_max_size": "10"}, "a whole number from 1 to"),
        ({"poll_interval_s": 0}, "from 0.01 to 3600"),
        ({"batch_rpm": 0}, "from 1 to"),
        ({"linger_ms": None}, "from 0 to"),
        ({"sync_rpm": -5}, "from 1 to"),
        ({"max_input_tokens": 0}, "from 1 to"),
        ({"enforce_pre_queue_validation": 1}, "true or false"),
        ({"metrics_prefix": "has space"}, "begins with a letter"),
        ({"metrics_prefix": ""}, "begins with a letter"),
        ({"track_sync_batch_split": "yes"}, "true or false"),
        ({"alert_on_batch_failure_rate": 1.5}, "from 0 to 1"),
        ({"max_attempts": 0}, "from 1 to"),
        ({"on_disconnect": "drop"}, "keep or cancel"),
        ({"max_waiting_calls": 0}, "from 1 to"),
        ({"retain_days": -1}, "from 0 to"),
    ],
)
def test_each_setting_names_itself_its_value_and_its_range(settings: dict[str, Any], allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RoutingPolicy(**settings)
    (name, value), message = next(iter(settings.items())), str(caught.value)
    assert message.startswith(f"{name} is {value!r}; it must be ")
    assert allowed in message


def test_minimum_above_maximum() -> None:
    with pytest.raises(ConfigError, match="batch_min_size is 11, which is more than batch_max_size, 10"):
        RoutingPolicy(batch_min_size=11, batch_max_size=10)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "routing: {min_batch_sise: 3}",
            "routing.min_batch_sise is not a setting: did you mean routing.min_batch_size?",
        ),
        ("rooting: {}", "rooting is not a setting: did you mean routing?"),
        ("store: {zzz: 1}", "store.zzz is not a setting: known are retain_days, url, encrypt."),
        ("routing: {1: 2}", "routing.1 is not a setting"),
        ("routing: {min_batch_size: 0}", "routing.min_batch_size is 0; it must be a whole number from 1"),
        ("routing: {min_batch_size: ten}", "routing.min_batch_size is 'ten'"),
        ("routing: 5", "The section routing must hold `key: value` pairs, but holds int."),
        ("- routing", "The file must hold `key: value` pairs, but holds list."),
        ("just words", "The file must hold `key: value` pairs, but holds str."),
        ("routing: {min_batch_size: 20, max_batch_size: 10}", "batch_min_size is 20"),
        ("routing: {", "This is not valid YAML"),
        ("a: !!timestamp nonsense", "This is not valid YAML"),
        ("a: !!bool nonsense", "This is not valid YAML"),
        ("a: 2026-99-99", "This is not valid YAML"),
        ("[" * 1000, "This is not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']", "This is not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


def test_one_setting_said_twice_must_agree(tmp_path: Path) -> None:
    message = refusal(tmp_path, "routing: {min_batch_size: 3}\nbatching: {min_batch_size: 4}")
    assert "batching.min_batch_size is 4, but routing.min_batch_size says 3" in message
    assert from_text(tmp_path, "routing: {min_batch_size: 3}\nbatching: {min_batch_size: 3}").batch_min_size == 3


def test_a_bomb_of_aliases_does_not_explode_in_the_message(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    bomb = "caching:\n" + "\n".join(f"  {line}" for line in lines) + "\nrouting: {min_batch_size: *a11}"
    assert len(refusal(tmp_path, bomb)) < 2000


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: The file can't be read"):
        RoutingPolicy.from_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="can't be read"):
        RoutingPolicy.from_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"routing: {x: \xff}")
    with pytest.raises(ConfigError, match="can't be read"):
        RoutingPolicy.from_yaml(str(tmp_path / "latin.yaml"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("10m", 600), ("2h", 7200), ("1.5h", 5400), ("500ms", 0.5), ("45", 45), (" 7 s ", 7), (".5s", 0.5)],
)
def test_budgets(text: str, seconds: float) -> None:
    assert parse_budget(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", "s", "-5s", "0", "0.0h", "1e3", "nan", "inf", "10 minutes", "5M", "1h30m", "٣s", "721h", "9" * 400, "5s\n6s"],
)
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(BadCall) as caught:
        parse_budget(text)
    assert str(caught.value).endswith(".")
    assert len(str(caught.value)) < 200


@given(st.text(max_size=30))
def test_any_text_is_a_budget_in_range_or_a_bad_call(text: str) -> None:
    try:
        seconds = parse_budget(text)
    except BadCall:
        return
    assert 0 < seconds <= 30 * 86_400
