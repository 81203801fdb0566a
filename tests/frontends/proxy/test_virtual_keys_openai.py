"""Virtual keys at a provider of OpenAI's wire, and two providers behind one door."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest

from carpool.core.keys import Profile, header_forms, new_key
from carpool.dialects import get as get_dialect
from carpool.mock import MockConfig, expected_openai_text

from .test_openai_calls import both, chat

HOUSE = {"OPENAI_KEY": "sk-of-the-house", "ANTHROPIC_KEY": "sk-ant-of-the-house"}


@asynccontextmanager
async def hosting(**profile: Any) -> AsyncIterator[tuple[Any, str]]:
    """A door to both, and a key for OpenAI."""
    async with both(MockConfig(keys=frozenset(HOUSE.values()))) as stage:
        key, secret = new_key(
            stage.store.pepper, "ci", "openai", "OPENAI_KEY", stage.engine._context.now(), profile=Profile(**profile)
        )
        await stage.store.write_keys([key])
        await stage.engine.virtual_key_cache.open(
            lambda provider, variable: header_forms(get_dialect(provider).key_headers, HOUSE[variable])
        )
        yield stage, secret


def client(stage: Any, key: str, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key, max_retries=0, **more)


async def test_the_sdk_works_and_the_ledger_names_the_key() -> None:
    async with hosting(tags={"team": "ci"}) as (stage, secret), client(stage, secret) as sdk:
        answer = await sdk.chat.completions.create(**chat("hello"))
        assert answer.choices[0].message.content == expected_openai_text(chat("hello"))
        assert [one async for one in await sdk.chat.completions.create(**chat("hi"), stream=True)]
        assert (await sdk.models.list()).data
        entries = await stage.booked(2)
        assert {entry.tags["team"] for entry in entries} == {"ci"}
        assert len({entry.credential for entry in entries}) == 1


async def test_a_base_url_without_a_version_reaches_as_far() -> None:
    async with hosting() as (stage, secret), httpx2.AsyncClient() as http:
        asked = {"headers": {"authorization": f"Bearer {secret}"}}
        answer = await http.post(f"{stage.url}/chat/completions", json=chat("hello"), **asked)
        assert answer.json()["choices"][0]["message"]["content"] == expected_openai_text(chat("hello"))
        assert (await http.get(f"{stage.url}/files", **asked)).status_code == 403


async def test_it_reaches_its_own_provider_only() -> None:
    """Whatever wire it speaks."""
    async with hosting() as (stage, secret), httpx2.AsyncClient() as http:
        body = {"model": "claude-haiku-4-5", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        headers = {"x-api-key": secret, "anthropic-version": "2023-06-01"}
        wrong = await http.post(f"{stage.url}/v1/messages", json=body, headers=headers)
        assert wrong.status_code == 403
        named = await http.post(f"{stage.url}/@provider=anthropic/v1/messages", json=body, headers=headers)
        assert named.status_code == 403
        assert "buys from openai only" in named.text


async def test_stored_things_of_the_account_are_shut() -> None:
    async with hosting() as (stage, secret), httpx2.AsyncClient() as http:
        for method, path in [
            *(("GET", "/v1/responses/resp_1"), ("DELETE", "/v1/responses/resp_1"), ("GET", "/v1/responses")),
            *(("GET", "/v1/chat/completions"), ("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches")),
            *(("POST", "/v1/conversations"), ("GET", "/v1/vector_stores"), ("GET", "/v1/organization/usage")),
        ]:
            answer = await http.request(method, stage.url + path, headers={"authorization": f"Bearer {secret}"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_error"), (method, path)


async def test_a_websocket_is_refused_as_for_everybody() -> None:
    async with hosting() as (stage, secret), httpx2.AsyncClient() as http:
        headers = {"authorization": f"Bearer {secret}", "connection": "upgrade", "upgrade": "websocket"}
        assert (await http.get(f"{stage.url}/v1/responses", headers=headers)).status_code == 426
        assert (await http.get(f"{stage.url}/v1/files", headers=headers)).status_code == 501


async def test_an_organisation_of_the_clients_own_is_refused() -> None:
    async with hosting() as (stage, secret), client(stage, secret, organization="org-other") as sdk:
        with pytest.raises(openai.PermissionDeniedError, match="decides who pays"):
            await sdk.chat.completions.create(**chat())


async def test_a_wrong_key_is_told_in_openais_words() -> None:
    async with hosting() as (stage, _), client(stage, "cpk-" + "x" * 43) as sdk:
        with pytest.raises(openai.AuthenticationError, match="does not know this virtual key"):
            await sdk.chat.completions.create(**chat())
