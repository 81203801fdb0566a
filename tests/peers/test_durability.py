"""Bugs of durability and identity that others had, 16 to 21: none of them may ever be ours."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from carpool import BatchUnknown, KeyConflict
from carpool.mock import Constant, expected_text
from tests.support.fleets import (
    KEY,
    QUICK,
    SOON,
    Arrived,
    ask,
    blocking,
    dispatching,
    faulty,
    provided,
    riding,
    soon,
    text_of,
    until,
)

# ---------------------------------------------------------------- 16: nothing is bought twice


@pytest.mark.parametrize(
    "fault",
    ["create_500", "create_529", "create_cut", "create_accepted_500", "create_accepted_529", "create_accepted_cut"],
)
async def test_16_a_create_with_unknown_outcome_is_not_repeated(fault: str) -> None:
    """Guard: nothing below the engine retries a create; a 5xx or a cut leaves one create at the provider."""
    async with riding(max_retries=5) as scene:
        scene.provider.script(fault)
        call = scene.start("once")
        [unknown] = await scene.events.wait(BatchUnknown)
        assert unknown.count == 1
        if "accepted" in fault:  # it is found again by its results, and answers
            assert text_of(await soon(call)) == expected_text(ask("once"))
            assert len(scene.charges()) == 1
        else:
            await asyncio.sleep(0.5)
            call.cancel()
        assert len(scene.log.creates) == 1


async def test_16_a_refused_create_is_repeated_by_the_engine_only(tmp_path: Path) -> None:
    """Guard: a 429 is an answer: nothing was bought, and each further create is the engine's own, after the pause."""
    async with riding(faulty(retry_after_s=1), max_retries=5, store=tmp_path / "s.db") as scene:
        scene.provider.script("create_429")
        assert text_of(await soon(scene.fleet.submit(**ask("once")))) == expected_text(ask("once"))
        assert len(scene.log.creates) == 2
        assert all("x-stainless-retry-count" not in create.headers for create in scene.log.creates)
        assert len(scene.charges()) == 1


def test_16_the_blocking_client_does_not_repeat_a_create() -> None:
    """Guard: the same for `Fleet` over the blocking client."""
    with blocking() as (server, fleet):
        server.provider.script("create_accepted_500")
        assert text_of(fleet.submit(**ask("once"))) == expected_text(ask("once"))
        assert server.provider.requests_seen.count("create") == 1
        assert len(server.provider.bill.charges) == 1


async def test_16_a_rerun_does_not_buy_the_batch_again(tmp_path: Path) -> None:
    """Guard: the intent and the batch's id are on disk, so a rerun on the same file collects instead of buying."""
    store = tmp_path / "fleet.db"
    async with provided(faulty(batch_stuck=1.0)) as (server, log):
        async with dispatching(server.url, store=store, close_timeout=0.0) as fleet:
            calls = [asyncio.create_task(fleet.submit(**ask(f"call {i}"))) for i in range(5)]
            await until(lambda: fleet.stats.batches_submitted)
        await asyncio.gather(*calls, return_exceptions=True)
        for batch in server.provider.batches:
            server.provider.end_batch(batch.id)
        async with dispatching(server.url, store=store) as fleet:
            answers = await soon(asyncio.gather(*[fleet.submit(**ask(f"call {i}")) for i in range(5)]))
        assert [text_of(one) for one in answers] == [expected_text(ask(f"call {i}")) for i in range(5)]
        assert sum(len(create.json()["requests"]) for create in log.creates) == 5
        assert len(server.provider.bill.charges) == 5


# ---------------------------------------------------------------- 17: on disk, and in time


async def test_17_calls_and_batch_are_on_disk_before_the_batch_ends(tmp_path: Path) -> None:
    """Guard: when the create arrives at the provider the calls and the intent are in the file; then the id is."""
    store = tmp_path / "fleet.db"
    seen: list[tuple[int, int]] = []

    def rows(query: str) -> list[Any]:
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
            return connection.execute(query).fetchall()

    async def look(request: Arrived) -> None:
        if request.path == "/v1/messages/batches" and request.method == "POST":
            [(calls,)] = rows("SELECT count(*) FROM calls JOIN bodies ON bodies.ticket = calls.id")
            [(intents,)] = rows("SELECT count(*) FROM batches WHERE state = 'submitting'")
            seen.append((calls, intents))

    async with riding(faulty(batch_stuck=1.0), replace(QUICK, linger_ms=200), store=store) as scene:
        scene.log.gate = look
        calls = [scene.start(f"call {i}") for i in range(3)]
        [bought] = await scene.bought()
        assert seen == [(3, 1)]
        assert rows("SELECT state, provider_id FROM batches") == [("open", bought.provider_id)]
        scene.provider.end_batch(bought.provider_id)
        await soon(asyncio.gather(*calls))


async def test_17_a_copy_of_the_file_at_any_moment_is_sound(tmp_path: Path) -> None:
    """Guard: the state is never overwritten in place: what a crash would leave is whole at every point on the way."""
    store = tmp_path / "fleet.db"
    checked: list[str] = []

    def copied() -> Path:
        copy = tmp_path / "copy.db"
        for suffix in ("", "-wal"):
            source = Path(f"{store}{suffix}")
            Path(f"{copy}{suffix}").write_bytes(source.read_bytes() if source.exists() else b"")
        return copy

    async def check(point: str) -> None:
        copy = copied()
        with closing(sqlite3.connect(copy)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert connection.execute("SELECT count(*) FROM calls").fetchone() >= (1,)
        checked.append(point)

    async with riding(store=store, probe=check) as scene:
        await soon(scene.fleet.submit(**ask()))
        await scene.collected()
    assert {"admitted", "intended", "created", "bought", "ended", "settled", "collected"} <= set(checked)


# ---------------------------------------------------------------- 18: whose headers, whose key


async def test_18_betas_never_share_a_batch() -> None:
    """Guard: betas are part of the pool: each batch is created with the betas of all its calls, and no others."""
    async with riding(SOON, replace(QUICK, linger_ms=200)) as scene:
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("plain", {}),
            ("one", {"betas": ["context-1m-2025-08-07"]}),
            ("two", {"betas": ["context-1m-2025-08-07", "files-api-2025-04-14"]}),
            ("header", {"extra_headers": {"anthropic-beta": "output-300k-2026-03-24"}}),
        ]
        await soon(
            asyncio.gather(
                *[scene.fleet.submit(**ask(f"{name} {i}"), **more) for i in range(3) for name, more in kinds]
            )
        )
        found = {}
        for create in scene.log.creates:
            names = {text.split()[0] for text in create.texts}
            assert len(names) == 1
            beta = create.headers.get("anthropic-beta", "")
            found[names.pop()] = {part.strip() for part in beta.split(",") if part.strip()}
        assert found == {
            "plain": set(),
            "one": {"context-1m-2025-08-07"},
            "two": {"context-1m-2025-08-07", "files-api-2025-04-14"},
            "header": {"output-300k-2026-03-24"},
        }


async def test_18_keys_never_share_a_batch() -> None:
    """Guard: each credential's calls are bought with that credential, looked for with it, and billed to it."""
    async with riding(SOON, replace(QUICK, linger_ms=200)) as scene:
        keys = [KEY, "sk-tenant-a", "sk-tenant-b"]
        calls = [
            scene.fleet.submit(**ask(f"{key} {i}"), extra_headers={"x-api-key": key}) for i in range(4) for key in keys
        ]
        await soon(asyncio.gather(*calls))
        assert len(scene.log.creates) == 3
        for create in scene.log.creates:
            assert {text.split()[0] for text in create.texts} == {create.headers["x-api-key"]}
        for request in scene.log.requests:
            batch = request.path.removeprefix("/v1/messages/batches").strip("/").split("/")[0]
            if batch:
                assert scene.provider.batch(batch).credential == request.headers["x-api-key"]
        assert {key: len([c for c in scene.charges() if c.credential == key]) for key in keys} == dict.fromkeys(keys, 4)


async def test_18_other_extra_headers_never_share_a_batch() -> None:
    """Guard: whatever header a caller adds travels with its own batch, and with no other."""
    async with riding(SOON, replace(QUICK, linger_ms=200)) as scene:
        calls = [
            scene.fleet.submit(**ask(f"{team} {i}"), extra_headers={"x-team": team}) for i in range(2) for team in "ab"
        ]
        await soon(asyncio.gather(*calls))
        by_team = {
            create.headers["x-team"]: {
                line["params"]["messages"][0]["content"][0] for line in create.json()["requests"]
            }
            for create in scene.log.creates
        }
        assert by_team == {"a": {"a"}, "b": {"b"}}


# ---------------------------------------------------------------- 19: faithful bodies

RICH: dict[str, Any] = {
    "model": "claude-sonnet-5",
    "max_tokens": 1000,
    "system": [{"type": "text", "text": "Überlege. 思考。🙂", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": 'Line\n"quoted" \\ and \u2028 \u0007'}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "c2ln+/=="}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "1e400 is not a float"}]},
    ],
    "tools": [{"name": "find", "description": "", "input_schema": {"type": "object", "properties": {"x": {}}}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive"},
    "stop_sequences": ["\n\n"],
    "metadata": {"user_id": "u-1"},
    "service_tier": "auto",
    "extra_body": {"temperature": 0.10, "top_k": 12345678901234567890, "unheard_of": {"deep": [None, True, 1.0e-7]}},
}


async def test_19_bodies_travel_faithful_on_both_lanes() -> None:
    """Guard: the provider sees byte for byte the body that the bare SDK sends, on `now` and inside a batch line."""
    async with riding() as scene:
        await soon(scene.client.messages.create(**RICH))
        await soon(scene.fleet.submit_sync(**RICH))
        await soon(scene.fleet.submit_batch(**RICH))
        plain, by_now = (request.body for request in scene.log.messages)
        assert by_now == plain
        [create] = scene.log.creates
        assert b'"params":' + plain + b"}" in create.body
        [line] = scene.lines
        assert line["params"]["unheard_of"] == RICH["extra_body"]["unheard_of"]


async def test_19_headers_travel_faithful_on_now() -> None:
    """Guard: on `now` the provider sees the headers of the bare SDK, apart from those of the connection."""
    async with riding() as scene:
        more = {"extra_headers": {"x-trace": "abc"}, "betas": ["files-api-2025-04-14"]}
        await soon(scene.client.beta.messages.create(**ask("same"), **more))  # type: ignore[arg-type]
        await soon(scene.fleet.submit_sync(**ask("same"), **more))
        plain, by_now = (request.headers for request in scene.log.messages)
        wanted = {"x-api-key", "anthropic-version", "anthropic-beta", "x-trace", "content-type"}
        assert {name: by_now.get(name) for name in wanted} == {name: plain.get(name) for name in wanted}


# ---------------------------------------------------------------- 20, 21: samples and retries


async def test_20_identical_prompts_are_independent_samples() -> None:
    """Guard: equal bodies of callers that all wait are bought one by one: as many lines and charges as callers."""
    async with riding(SOON, replace(QUICK, linger_ms=200)) as scene:
        answers = await soon(asyncio.gather(*[scene.fleet.submit(**ask("a poem")) for _ in range(4)]))
        assert len({answer.id for answer in answers}) == 4
        assert len(scene.lines) == 4
        assert len({line["custom_id"] for line in scene.lines}) == 4
        assert len(scene.charges()) == 4
        again = await soon(scene.fleet.submit(**ask("a poem")))  # answered ones are not given again either
        assert again.id not in {answer.id for answer in answers}


async def test_21_a_retry_after_a_client_timeout_is_not_bought_again() -> None:
    """Guard: a caller that gave up and asks the same again adopts its own purchase."""
    async with riding(faulty(batch_stuck=1.0)) as scene:
        given_up = scene.start("slow")
        [bought] = await scene.bought()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(given_up, 0.01)
        again = scene.start("slow")
        await until(lambda: scene.fleet.stats.returned_calls)
        scene.provider.end_batch(bought.provider_id)
        assert text_of(await soon(again)) == expected_text(ask("slow"))
        assert len(scene.lines) == 1
        assert len(scene.charges()) == 1


async def test_21_an_answer_that_came_meanwhile_is_given_to_the_retry() -> None:
    """Guard: a batch that ends after its caller gave up is kept for the one who comes back."""
    async with riding(faulty(batch_stuck=1.0)) as scene:
        call = scene.start("slow")
        [bought] = await scene.bought()
        call.cancel()
        scene.provider.end_batch(bought.provider_id)
        await scene.collected()
        assert text_of(await soon(scene.fleet.submit(**ask("slow")), 2)) == expected_text(ask("slow"))
        assert len(scene.charges()) == 1


async def test_21_a_retry_under_the_same_key_is_the_same_call() -> None:
    """Guard: a key names the call: cancelled and asked again it is bought once, also while it still waited."""
    async with riding(SOON, replace(QUICK, linger_ms=300)) as scene:
        call = scene.start("keyed", key="order-1")
        await scene.admitted()
        call.cancel()
        answer = await soon(scene.fleet.submit(**ask("keyed"), key="order-1"))
        assert text_of(answer) == expected_text(ask("keyed"))
        assert len(scene.lines) == 1
        with pytest.raises(KeyConflict):
            await soon(scene.fleet.submit(**ask("another"), key="order-1"))
        assert len(scene.charges()) == 1


async def test_21_a_retry_in_a_new_process_is_not_bought_again(tmp_path: Path) -> None:
    """Guard: the purchase is found by its body, or by its key, in the file that an earlier dispatcher left."""
    store = tmp_path / "fleet.db"
    async with provided(replace(SOON, batch_latency=Constant(0.6))) as (server, _log):
        async with dispatching(server.url, store=store, close_timeout=0.0) as fleet:
            calls = [
                asyncio.create_task(fleet.submit(**ask("by body"))),
                asyncio.create_task(fleet.submit(**ask("by key"), key="k-1")),
            ]
            await until(lambda: sum(batch.size for batch in server.provider.batches) == 2)
            await until(lambda: fleet.stats.batches_submitted == len(server.provider.batches))
        await asyncio.gather(*calls, return_exceptions=True)
        async with dispatching(server.url, store=store) as fleet:
            answers = await soon(
                asyncio.gather(fleet.submit(**ask("by body")), fleet.submit(**ask("by key"), key="k-1"))
            )
            assert [text_of(one) for one in answers] == [expected_text(ask(f"by {what}")) for what in ("body", "key")]
        assert len(server.provider.bill.charges) == 2
