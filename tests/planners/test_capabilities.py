"""One table of what models can do, and what a config says of them."""

import pytest

from carpool import dialects
from carpool.core.errors import ConfigError
from carpool.core.ports import Capability
from carpool.dialects import COMPATIBLE_PROVIDERS, OPENAI, OpenAI
from carpool.planners.routing import KEYS, Capabilities, read_models

TABLE = Capabilities()


def of(model: str, dialect: str = "openai") -> Capability:
    return TABLE.of(dialect, dialects.get(dialect), model)


def of_provider(name: str, model: str) -> Capability:
    return TABLE.of(name, OpenAI(COMPATIBLE_PROVIDERS[name]), model)


@pytest.mark.parametrize("model", ["gpt-5.3-codex", "gpt-5-chat-latest", "gpt-realtime", "gpt-4o-audio-preview"])
def test_models_without_a_batch_price_do_not_batch(model: str) -> None:
    assert not of(model).batch
    assert not of(model).flex


@pytest.mark.parametrize(
    "model", ["gpt-6-luna", "gpt-6-astra", "gpt-5.6-sol", "gpt-5.4-nano", "gpt-5", "o3", "o4-mini"]
)
def test_models_with_a_flex_price_may_flex(model: str) -> None:
    assert of(model).batch
    assert of(model).flex


@pytest.mark.parametrize("model", ["gpt-4o", "gpt-4.1-mini", "gpt-6.1-terra", "text-embedding-3-small", "my-own"])
def test_the_others_batch_only(model: str) -> None:
    assert of(model).batch
    assert not of(model).flex


def test_limits_and_caches() -> None:
    assert of("gpt-6-sol").context_tokens == 922_000
    assert of("gpt-5.5").context_tokens == 1_050_000
    assert of("gpt-4o").cacheable_tokens == 1024
    assert of("claude-haiku-4-5-20251001", "anthropic").cacheable_tokens == 4096
    assert of("claude-opus-5", "anthropic") == Capability(
        context_tokens=1_000_000, output_tokens=128_000, cacheable_tokens=512
    )
    assert of("nobody-knows", "anthropic") == Capability()


def test_a_config_goes_before_the_table_and_changes_only_what_it_names() -> None:
    said = read_models(
        {"gpt-6-*": {"flex": False}, "exact": {"batch": False, "context_tokens": 7}}, "providers.x.models"
    )
    own = Capabilities({"x": said})
    assert own.of("x", OPENAI, "gpt-6-luna").batch
    assert not own.of("x", OPENAI, "gpt-6-luna").flex
    assert own.of("x", OPENAI, "gpt-6-luna").context_tokens == 922_000
    assert own.of("other", OPENAI, "gpt-6-luna").flex
    assert own.of("x", OPENAI, "exact") == Capability(batch=False, context_tokens=7)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"m": {"batsh": True}}, "did you mean"),
        ({"m": {"batch": "yes"}}, "true or false"),
        ({"m": {"context_tokens": -1}}, "whole number"),
        ({7: {"batch": True}}, "write names or globs"),
        ({"m": 3}, "must hold"),
        (3, "must hold"),
    ],
)
def test_mistakes_are_told_in_a_sentence(value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_models(value, "providers.x.models")


def test_every_capability_can_be_set() -> None:
    values = dict.fromkeys(KEYS, False) | {key: 1 for key in KEYS if key.endswith(("tokens", "price"))}
    assert Capabilities({"x": read_models({"m": values}, "here")}).of("x", OPENAI, "m") == Capability(**values)


@pytest.mark.parametrize(
    ("name", "model", "batch", "share"),
    [
        ("together", "meta-llama/Llama-3.3-70B-Instruct-Turbo", True, 0.5),
        ("together", "deepseek-ai/DeepSeek-V3", False, 0.5),
        ("xai", "grok-4.3", True, 0.8),
        ("xai", "grok-4.20-0309-reasoning", True, 0.8),
        ("xai", "grok-4.7", False, 0.5),
        ("groq", "openai/gpt-oss-120b", True, 0.5),
        ("mistral", "mistral-large-latest", True, 0.5),
    ],
)
def test_relatives_have_rows_of_their_own(name: str, model: str, batch: bool, share: float) -> None:
    able = of_provider(name, model)
    assert (able.batch, able.batch_price) == (batch, share)


def test_flex_is_off_where_it_is_not_sure_or_saves_nothing() -> None:
    assert TABLE.of("x", OPENAI, "gpt-5-mini").flex
    assert not of_provider("azure", "gpt-5-mini").flex
    assert (of_provider("groq", "any").flex, of_provider("groq", "any").flex_price) == (False, 1.0)
