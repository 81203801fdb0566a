"""A proxy whose clients have virtual keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from carpool.core.keys import Profile, header_forms, new_key
from carpool.core.model import Headers
from carpool.dialects import get as get_dialect
from tests.support.stage import Stage, staged

HOUSE = "sk-ant-of-the-house"
VARIABLES = {"HOUSE_KEY": HOUSE, "OTHER_KEY": "sk-ant-of-others"}


def find_secrets(provider: str, variable: str) -> list[Headers]:
    return header_forms(get_dialect("anthropic").key_headers, VARIABLES[variable]) if variable in VARIABLES else []


async def give(stage: Stage, name: str, profile: Profile | None = None, env: str = "HOUSE_KEY", **more: Any) -> str:
    """A key that works when this returns."""
    store, now = stage.engine._context.store, stage.engine._context.now()
    provider = more.pop("provider", "anthropic")
    key, secret = new_key(store.pepper, name, provider, env, now, profile=profile, **more)
    await store.write_keys([key])
    await stage.engine.virtual_key_cache._read()
    return secret


@asynccontextmanager
async def hosting(*arguments: Any, **more: Any) -> AsyncIterator[Stage]:
    async with staged(*arguments, **more) as stage:
        await stage.engine.virtual_key_cache.open(find_secrets)
        yield stage
