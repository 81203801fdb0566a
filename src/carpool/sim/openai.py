"""The requests of a simulated OpenAI fleet, and the faults that only OpenAI has."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from carpool.mock import Constant, Latency, MockConfig, OpenAIConfig, Uniform

CHAT, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/responses", "/v1/embeddings"
COMPLETIONS, MODERATIONS = "/v1/completions", "/v1/moderations"
LEGACY = ((COMPLETIONS, "gpt-3.5-turbo-instruct"), (MODERATIONS, "omni-moderation-latest"))
_FLEX, _NO_FLEX, _NO_BATCH = ("gpt-6-luna", "gpt-5-mini"), ("gpt-5.2", "gpt-4o-mini"), ("gpt-5.3-codex",)
_TALKERS = _FLEX * 3 + _NO_FLEX + _NO_BATCH
MODELS = {
    CHAT: _TALKERS,
    RESPONSES: _TALKERS,
    EMBEDDINGS: ("text-embedding-3-small", "text-embedding-3-large"),
}
ENDPOINTS = (CHAT, CHAT, RESPONSES, EMBEDDINGS)
Menu = Sequence[tuple[str, str]]  # endpoint and model
HOOK_URL = "http://carpool.invalid/carpool/hooks/openai"
# The maximum probability of each fault that is drawn.
FAULTS = {
    "upload_cut": 0.3,
    "upload_hang": 0.2,
    "upload_500": 0.3,
    "upload_529": 0.2,
    "upload_429": 0.3,
    "upload_accepted_cut": 0.3,
    "upload_accepted_hang": 0.2,
    "upload_accepted_500": 0.3,
    "file_lag": 0.6,
    "delete_500": 0.4,
    "token_limit": 0.5,
    "cancel_forgets": 0.5,
    "flex_429": 0.7,
    "hook_lost": 0.5,
    "hook_double": 0.5,
    "hook_late": 0.5,
}


def menu(rng: random.Random, seed: int) -> Menu:
    """The endpoints and models of a world. Few, so that files, which have one model and endpoint, get several lines."""
    endpoints = [rng.choice(ENDPOINTS) for _ in range(rng.choice([1, 2, 3, 6]))]
    offered = [(endpoint, rng.choice(MODELS[endpoint])) for endpoint in endpoints]
    return [*offered, *LEGACY] if seed % 6 == 5 else offered


def with_its_own(rng: random.Random, config: MockConfig, keys: list[str]) -> MockConfig:
    """The mock provider as OpenAI: files, flex, webhooks, and a limit of enqueued tokens."""
    level = rng.choice([0.0, 0.15, 0.4])
    drawn = {name: rng.random() * most for name, most in FAULTS.items() if rng.random() < level}
    faults = replace(
        config.faults,
        **drawn,  # type: ignore[arg-type]
        file_lag_s=rng.choice([0.6, 5.0, 120.0]),
        hook_late_s=rng.choice([5.0, 900.0]),
    )
    own = OpenAIConfig(
        validation_latency=_up_to(20.0, rng),
        finalizing_latency=_up_to(30.0, rng),
        flex_latency=rng.choice([None, Uniform(1.0, 40.0)]),
        creates_per_hour=rng.choice([2000, 2000, 20]),
        enqueued_tokens=rng.choice([{}, {}, {"*": 40}, {"*": 200, "gpt-6-luna": 25}]),
        webhook_url=rng.choice([None, HOOK_URL, HOOK_URL]),
        webhook_latency=_up_to(5.0, rng),
    )
    barred = frozenset(keys[:1]) if rng.random() < 0.08 else frozenset()
    expiry = rng.choice([config.expiry_s, 600.0])  # short enough that batches expire with partial results
    return replace(config, faults=faults, openai=own, keys_without_batch=barred, expiry_s=expiry)


def _up_to(seconds: float, rng: random.Random) -> Latency:
    return Constant(0.0) if rng.random() < 0.5 else Uniform(0.0, seconds)
