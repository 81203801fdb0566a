from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carpool.config import Config, Flag, Provider, read_config
from carpool.config.sections import PROVIDER_KEYS
from carpool.core.errors import ConfigError
from carpool.planners.access.read_rules import EFFECTS, MATCHES
from carpool.planners.policy import RoutingPolicy, places, section_keys, sections
from tests.support import ROOT

SECRET = "sk-ant-api03-very-secret"
WHOLE = """
providers:
  anthropic: {dialect: anthropic, base_url: "https://api.anthropic.com", api_key_env: MY_ANTHROPIC}
  openai:    {dialect: openai,    base_url: "https://api.openai.com/v1"}
routing:   {default_budget: null, sync_latency_cap_ms: 5000, rules: [{match: {subagent: true}, budget: 8m}, {match: {model: "*haiku*"}, lane: now}]}
batching:  {rpm: 50, linger_ms: 500, batch_window_ms: 30000, min_batch_size: 1, max_batch_size: 100000, poll_interval_s: 2}
caching:   {mode: observe}
limits:    {max_input_tokens_per_request: null, enforce_pre_queue_validation: true, max_body_mb: 16, max_waiting_calls: 200000}
budgets:   []
observability: {metrics_prefix: carpool, track_sync_batch_split: true, otlp_endpoint: null, alert_on_batch_failure_rate: 0.05}
store: {url: "sqlite:///carpool.db", retain_days: 7}
"""  # noqa: E501

Read = Callable[..., Config]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def reading(text: str = "", environ: Mapping[str, str] | None = None, *flags: Flag) -> Config:
        path = tmp_path / "carpool.yaml"
        path.write_text(text, encoding="utf-8")
        return read_config(path, environ or {}, flags)

    return reading


@pytest.fixture
def refusal(read: Read) -> Callable[..., str]:
    def refused(*arguments: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            read(*arguments)
        said = str(caught.value)
        assert said.endswith((".", "?"))
        assert SECRET not in said
        return said

    return refused


def test_without_anything_the_defaults_hold() -> None:
    config = read_config(None, {})
    assert config == Config()
    assert [(one.name, one.dialect, one.base_url, one.default) for one in config.providers] == [
        ("anthropic", "anthropic", "https://api.anthropic.com", True),
        ("openai", "openai", "https://api.openai.com/v1", True),
    ]
    assert config.policy == RoutingPolicy()
    assert not config.book
    assert (config.store, config.max_body) == ("carpool.db", 32_000_000)


def test_the_whole_of_a_config(read: Read) -> None:
    config = read(WHOLE)
    assert config.policy.sync_max_latency_ms == 5000
    assert config.policy.batch_rpm == 50
    assert config.max_body == 16_000_000
    assert config.store == "sqlite:///carpool.db"
    assert config.providers[0].api_key_env == "MY_ANTHROPIC"
    assert [rule.budget for rule in config.book.rules] == [480, None]
    assert config.notes == (
        "providers.anthropic.api_key_env names MY_ANTHROPIC, which is not set: clients must bring a key.",
    )
    assert read(WHOLE, {"MY_ANTHROPIC": SECRET}).notes == ()


def test_no_value_of_a_config_holds_a_key(read: Read) -> None:
    assert SECRET not in repr(read(WHOLE, {"MY_ANTHROPIC": SECRET}))


# ---------------------------------------------------------------- providers


@pytest.mark.parametrize("key", ["…", "sk-ant-ключ", "sk-ant\nsecond line"])
@pytest.mark.parametrize("setting", ["api_key_env", "webhook_secret_env"])
def test_a_variable_that_holds_no_key_is_refused(refusal: Callable[..., str], setting: str, key: str) -> None:
    said = refusal(f"providers: {{openai: {{{setting}: MY_KEY}}}}", {"MY_KEY": key})
    assert said.endswith("MY_KEY holds a character that no key has. Set it to the key itself.")
    assert key not in said


def test_a_list_in_the_file_is_the_whole_list(read: Read) -> None:
    config = read("providers: {anthropic: {}}")
    assert [one.name for one in config.providers] == ["anthropic"]
    assert read("providers: {}").providers == Config().providers
    assert read("providers:").providers == Config().providers


def test_a_provider_of_any_name(read: Read) -> None:
    config = read("providers: {local: {dialect: openai, base_url: 'http://127.0.0.1:8000/v1'}}")
    assert config.providers == (Provider("local", "openai", "http://127.0.0.1:8000/v1", None, True),)
    assert config.notes == ()


@pytest.mark.parametrize(
    ("marks", "default"),
    [({}, "openai"), ({"local": True}, "local"), ({"openai": True}, "openai")],
)
def test_one_of_each_dialect_is_its_default(read: Read, marks: dict[str, bool], default: str) -> None:
    listed = {"openai": "https://api.openai.com/v1", "local": "http://127.0.0.1:1/v1"}
    lines = [
        f"  {name}: {{dialect: openai, base_url: '{url}', default: {str(marks.get(name, False)).lower()}}}"
        for name, url in listed.items()
    ]
    config = read("providers:\n" + "\n".join(lines))
    assert [one.name for one in config.providers if one.default] == [default]


def test_several_of_one_dialect_without_a_mark_have_no_default(read: Read) -> None:
    of = "{dialect: openai, allow_http: true, base_url: 'http://%s/v1'}"
    config = read(f"providers: {{a: {of % 'a'}, b: {of % 'b'}}}")
    assert not any(one.default for one in config.providers)
    assert len(config.notes) == 2
    assert "unencrypted" in config.notes[0]


# ---------------------------------------------------------------- environment and flags


def test_the_environment_overrides_the_file(read: Read) -> None:
    environ = {
        "CARPOOL_BATCHING__RPM": "7",
        "CARPOOL_LIMITS__MAX_BODY_MB": "1.5",
        "CARPOOL_ROUTING__DEFAULT_BUDGET": "5m",
        "CARPOOL_ROUTING__RULES": "[{match: {model: '*opus*'}, lane: now}]",
        "CARPOOL_CACHING__MODE": "off",
        "CARPOOL_PROVIDERS__OPENAI__BASE_URL": "http://127.0.0.1:9/v1",
        "CARPOOL_STORE__URL": "x.db",
        "CARPOOL_UPSTREAM": "not mine",
        "CARPOOL_SECRET": "not mine either",
    }
    config = read("batching: {rpm: 50}\nstore: {url: y.db}", environ)
    assert config.policy.batch_rpm == 7
    assert config.max_body == 1_500_000
    assert config.book.default_budget == 300
    assert [rule.lane for rule in config.book.rules] == ["now"]
    assert config.policy.caching == "off"
    assert [one.base_url for one in config.providers] == ["https://api.anthropic.com", "http://127.0.0.1:9/v1"]
    assert config.store == "x.db"
    assert config.origins["batching.rpm"] == "CARPOOL_BATCHING__RPM"


def test_an_empty_variable_unsets(read: Read) -> None:
    config = read("batching: {rpm: 50}\nrouting: {default_budget: 5m}", {"CARPOOL_BATCHING__RPM": ""})
    assert config.policy.batch_rpm is None
    assert config.book.default_budget == 300


def test_a_variable_wins_also_where_the_file_says_it_elsewhere(read: Read) -> None:
    config = read("routing: {min_batch_size: 3}", {"CARPOOL_BATCHING__MIN_BATCH_SIZE": "9"})
    assert config.policy.batch_min_size == 9
    assert "routing.min_batch_size" not in config.origins


def test_names_with_dashes_and_capitals_are_found(read: Read) -> None:
    text = "providers: {My-Server: {dialect: openai, base_url: 'http://127.0.0.1:1/v1'}}"
    config = read(text, {"CARPOOL_PROVIDERS__MY_SERVER__BASE_URL": "http://127.0.0.1:2/v1"})
    assert [(one.name, one.base_url) for one in config.providers] == [("My-Server", "http://127.0.0.1:2/v1")]


def test_flags_are_the_last_word(read: Read) -> None:
    flag = Flag(("providers", "anthropic", "base_url"), "http://127.0.0.1:3", "--upstream")
    environ = {"CARPOOL_PROVIDERS__ANTHROPIC__BASE_URL": "http://127.0.0.1:2"}
    config = read("providers: {openai: {}}", environ, flag)
    assert {one.name: one.base_url for one in config.providers} == {
        "openai": "https://api.openai.com/v1",
        "anthropic": "http://127.0.0.1:3",
    }
    assert config.origins["providers.anthropic.base_url"] == "--upstream"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("CARPOOL_BATCHING__RPMM", "1", "CARPOOL_BATCHING__RPMM is not a setting: did you mean CARPOOL_BATCHING__RPM?"),
        ("CARPOOL_BATHING__RPM", "1", "CARPOOL_BATHING__RPM is not a setting: did you mean CARPOOL_BATCHING?"),
        ("CARPOOL_BATCHING__RPM", "many", "CARPOOL_BATCHING__RPM is 'many'; it must be a whole number from 1"),
        ("CARPOOL_BATCHING__RPM", "{", "The value of CARPOOL_BATCHING__RPM is not valid YAML"),
        ("CARPOOL_BUDGETS__CI", "5", "CARPOOL_BUDGETS__CI is not a setting: the section budgets can be written"),
        ("CARPOOL_PROVIDERS__OPENAI", "x", "CARPOOL_PROVIDERS__OPENAI names no key of a provider"),
        ("CARPOOL_PROVIDERS__OPENAI__API_KEY", SECRET, "did you mean CARPOOL_PROVIDERS__OPENAI__API_KEY_ENV?"),
        ("CARPOOL_PROVIDERS__OPENAI__API_KEY_ENV", SECRET, "is not the name of an environment variable"),
        ("CARPOOL_PROVIDERS__OPENAI__BASE_URL", "nowhere", "is 'nowhere', which is not a provider's base URL"),
        ("CARPOOL_ROUTING__RULES", "[{lane: flex}]", "CARPOOL_ROUTING__RULES[0].lane is 'flex'; it must be"),
        ("CARPOOL_ROUTING__TIMEZONE", "Mars", "CARPOOL_ROUTING__TIMEZONE is 'Mars'; it must be a time zone"),
        ("CARPOOL_LIMITS__MAX_BODY_MB", "0", "CARPOOL_LIMITS__MAX_BODY_MB is 0; it must be a number from 0.001"),
    ],
)
def test_a_bad_variable_is_named(refusal: Callable[..., str], name: str, value: str, told: str) -> None:
    said = refusal("", {name: value})
    assert told in said
    assert "carpool.yaml" not in said


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rooting: {}", "rooting is not a setting: did you mean routing?"),
        ("batching: {rpm: 0}", "batching.rpm is 0; it must be a whole number from 1"),
        ("providers: [a]", "The section providers must hold `key: value` pairs, but holds list."),
        ("providers: {x: {}}", "providers.x.dialect is missing: say which API it has, anthropic or openai."),
        ("providers: {x: {dialect: openai}}", "providers.x.base_url is missing: say where the provider is"),
        ("providers: {openai: {dialect: anthropic}}", "providers.openai.base_url is missing"),
        ("providers: {x: {dialect: morse}}", "providers.x.dialect is 'morse'; it must be one of anthropic, openai."),
        (
            "providers: {openai: {url: x}}",
            "providers.openai.url is not a setting: did you mean providers.openai.base_url?",
        ),
        ("providers: {openai: {default: 1}}", "providers.openai.default is 1; it must be true or false."),
        ("providers: {'a b': {dialect: openai, base_url: 'http://a'}}", "it must be a name of letters"),
        ("providers: {1: {dialect: openai, base_url: 'http://a'}}", "it must be a name of letters"),
        ("providers: {openai: {base_url: 'ftp://x'}}", "providers.openai.base_url is 'ftp://x', which is not"),
        ("providers: {openai: {base_url: 'https://h/v1?x=1'}}", "which is not a provider's base URL"),
        ("providers: {openai: {base_url: 'http://[::1'}}", "which is not a provider's base URL"),
        ("providers: {openai: {base_url: 5}}", "providers.openai.base_url is 5, which is not"),
        (f"providers: {{openai: {{base_url: 'https://me:{SECRET}@h/v1'}}}}", "carries a user name or a password"),
        (f"providers: {{openai: {{api_key: {SECRET}}}}}", "providers.openai.api_key would put a key into a file."),
        (f"providers: {{openai: {{api_key_env: {SECRET}}}}}", "is not the name of an environment variable"),
        ("budgets: [{match: {tag.team: ci}, usd_per_day: 50}]", "it would spend past them. Take the section out"),
        ("budgets: {usd: 5}", "budgets sets spending limits"),
        ("caching: {keep_alive: 5}", "caching.keep_alive must hold `key: value` pairs, but holds int."),
        ("caching: {keep_alive: {most: 5}}", "caching.keep_alive.most is not a setting: known are max_usd_per_day."),
        ("caching: {mode: on}", "caching.mode is True; it must be off, observe or plan."),
        ("caching: {mod: off}", "caching.mod is not a setting: did you mean caching.mode?"),
        ("limits: {max_body_mb: lots}", "limits.max_body_mb is 'lots'; it must be a number from 0.001 to 1000."),
        ("limits: {max_headers: 5}", "limits.max_headers is 5; it must be a whole number from 10 to 10000."),
        ("limits: {slow_sender_s: 0}", "limits.slow_sender_s is 0; it must be a number from 0.1 to 86400."),
        ("limits: {max_header: 50}", "limits.max_header is not a setting: did you mean limits.max_headers?"),
        ("store: {url: 5}", "store.url is 5; it must be a path"),
        ("routing: {default_budget: never}", "routing.default_budget is 'never'; it must be a budget"),
        ("routing: {timezone: 5}", "routing.timezone is 5; it must be a time zone"),
        ("routing: {rules: now}", "routing.rules must be a list of rules"),
        (
            "observability: {otlp_endpoint: x}",
            "observability.otlp_endpoint is 'x', which is not the URL of a collector",
        ),
        (
            "providers: {a: {dialect: openai, base_url: 'https://a', default: true}, "
            "b: {dialect: openai, base_url: 'https://b', default: true}}",
            "providers.a and providers.b are both the default of the dialect openai: mark one.",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(refusal: Callable[..., str], tmp_path: Path, text: str, told: str) -> None:
    said = refusal(text)
    assert told in said
    assert said.startswith(f"{tmp_path / 'carpool.yaml'}: ")


def test_what_is_not_active_yet_is_noted(read: Read) -> None:
    config = read("observability: {otlp_endpoint: 'http://127.0.0.1:4318'}")
    assert config.notes == ("observability.otlp_endpoint is set, but traces are not sent yet.",)


def test_off_means_off(read: Read) -> None:
    assert read("caching: {mode: off}").policy.caching == read("caching: {mode: 'off'}").policy.caching == "off"


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def section(name: str) -> st.SearchStrategy[Any]:
    keys = {"providers": ("anthropic", "x")}.get(name) or section_keys(name) or ("x",)
    return JUNK | st.dictionaries(st.sampled_from(keys), JUNK, max_size=3)


DOCUMENTS = st.fixed_dictionaries({}, optional={name: section(name) for name in sections()})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DOCUMENTS)
def test_any_document_is_read_or_refused(read: Read, document: dict[str, Any]) -> None:
    try:
        read(json.dumps(document))  # YAML holds JSON
    except ConfigError as error:
        said = str(error)
    else:
        said = "Read."
    assert said.endswith((".", "?")) or "not valid YAML" in said


# ---------------------------------------------------------------- documents that can fail


def coded(name: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / name).read_text("utf-8")))


def test_every_key_of_the_file_is_documented() -> None:
    keys = {f"{name}.{key}" for name in sections() for key in section_keys(name)}
    keys |= {f"providers.NAME.{key}" for key in PROVIDER_KEYS}
    missing = keys - coded("config.md")
    assert not missing, f"docs/config.md does not mention {', '.join(sorted(missing))}."


def test_everything_that_a_rule_may_say_is_documented() -> None:
    missing = {*EFFECTS, *MATCHES, "name", "match"} - coded("rules.md")
    assert not missing, f"docs/rules.md does not mention {', '.join(sorted(missing))}."


def test_every_setting_of_a_policy_has_a_place_in_the_file() -> None:
    assert all(places(one.name) for one in fields(RoutingPolicy))


@pytest.mark.parametrize("page", ["config.md", "rules.md"])
def test_the_examples_in_the_docs_are_read(page: str, read: Read) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    examples = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert examples
    for example in examples:
        read(example)


# ---------------------------------------------------------------- OpenAI-compatible providers


@pytest.mark.parametrize(
    ("section", "vendor", "base_url"),
    [
        ("groq: {}", "groq", "https://api.groq.com/openai/v1"),
        ("mistral: {}", "mistral", "https://api.mistral.ai/v1"),
        ("together: {}", "together", "https://api.together.ai/v1"),
        ("xai: {}", "xai", "https://api.x.ai/v1"),
        ("fast: {vendor: groq}", "groq", "https://api.groq.com/openai/v1"),
        ("fast: {dialect: openai, base_url: 'https://api.groq.com'}", "groq", "https://api.groq.com/openai/v1"),
        (
            "mine: {dialect: openai, base_url: 'https://r.openai.azure.com'}",
            "azure",
            "https://r.openai.azure.com/openai/v1",
        ),
        ("azure: {base_url: 'https://r.openai.azure.com/openai/v1'}", "azure", "https://r.openai.azure.com/openai/v1"),
        (
            "fast: {vendor: openai, base_url: 'https://api.groq.com/openai/v1'}",
            "openai",
            "https://api.groq.com/openai/v1",
        ),
        ("here: {vendor: xai, base_url: 'http://127.0.0.1:1/v1'}", "xai", "http://127.0.0.1:1/v1"),
    ],
)
def test_a_vendor_is_known_by_name_setting_or_host(section: str, vendor: str, base_url: str, read: Read) -> None:
    provider = read(f"providers: {{{section}}}").providers[0]
    assert (provider.dialect, provider.vendor, provider.base_url) == ("openai", vendor, base_url)


def test_windows_and_versions(read: Read) -> None:
    provider = read("providers: {groq: {window: 7d}}").providers[0]
    assert provider.window == 7 * 86_400
    assert (
        read("providers: {azure: {base_url: 'https://r.openai.azure.com', api_version: preview}}")
        .providers[0]
        .api_version
        == "preview"
    )


def test_without_batches_no_model_has_one(read: Read) -> None:
    section = "dialect: openai, base_url: 'http://127.0.0.1:1/v1', batch: false"
    assert read(f"providers: {{local: {{{section}}}}}").providers[0].models == {"*": {"batch": False}}
    said = read(f"providers: {{local: {{{section}, models: {{m: {{flex: true}}}}}}}}").providers[0].models
    assert said == {"m": {"flex": True, "batch": False}, "*": {"batch": False}}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("groq: {window: 8d}", "from 24h to 168h"),
        ("openai: {window: 48h}", "24h, its only one"),
        ("groq: {window: 24}", "it must be"),
        ("x: {vendor: cousin, base_url: 'https://a.example/v1'}", "it must be one of"),
        ("azure: {}", "base_url is missing"),
        ("anthropic: {vendor: groq}", "take it out"),
        ("anthropic: {window: 24h}", "take it out"),
        ("groq: {webhook_secret_env: S}", "has none"),
        ("groq: {batch: 3}", "true or false"),
        ("azure: {base_url: 'https://r.openai.azure.com', api_version: 'a b'}", "a version such as"),
    ],
)
def test_mistakes_with_relatives_are_told(section: str, said: str, read: Read) -> None:
    with pytest.raises(ConfigError, match=said):
        read(f"providers: {{{section}}}")
