"""Time is injected, dice are seeded, and the app runs without a network."""

import ast
import asyncio
import random
import statistics
import time
from pathlib import Path

import msgspec
import pytest

import carpool.mock
from carpool.mock import (
    Constant,
    Faults,
    Latency,
    LogNormal,
    Mixture,
    MockAnthropic,
    MockConfig,
    Uniform,
    parse_latency,
)

SOURCES = sorted(Path(carpool.mock.__file__).parent.glob("*.py"))
SCOPE = {
    "type": "http",
    "query_string": b"",
    "headers": [(b"x-api-key", b"k"), (b"anthropic-version", b"2023-06-01"), (b"host", b"mock.test")],
}


def test_a_day_passes_in_a_moment_on_a_virtual_loop(virtual_loop, requests_of):
    async def poll_until_ended():
        loop = asyncio.get_running_loop()
        provider = MockAnthropic(
            MockConfig(batch_latency=Constant(80_000), control_latency=Constant(0.5)),
            now=lambda: 1_800_000_000 + loop.time(),
        )
        begun = loop.time()
        status, looks = await _call(provider, "POST", "", {"requests": requests_of("a")}), 0
        while status["processing_status"] != "ended":
            await asyncio.sleep(60)
            status, looks = await _call(provider, "GET", f"/{status['id']}"), looks + 1
        return loop.time() - begun, looks, provider

    with asyncio.Runner(loop_factory=virtual_loop) as runner:
        took, looks, provider = runner.run(poll_until_ended())
    assert 80_000 <= took <= 80_062
    assert looks == pytest.approx(80_000 / 60.5, abs=2)
    assert provider.requests_seen.count("retrieve") == looks


async def _call(provider, method, path, body=None):
    out = bytearray()

    async def receive():
        return {"type": "http.request", "body": msgspec.json.encode(body) if body else b"", "more_body": False}

    async def send(message):
        out.extend(message.get("body", b""))

    await provider.app({**SCOPE, "method": method, "path": f"/v1/messages/batches{path}"}, receive, send)
    return msgspec.json.decode(out)


async def test_one_seed_one_world(turned, requests_of, body):
    async def world_of(seed, looks):
        world = turned(
            MockConfig(
                seed=seed,
                batch_latency=parse_latency("lognormal:median=100,sigma=1"),
                per_request=True,
                faults=Faults(line_missing=0.2, line_api_error=0.2),
            )
        )
        batches = []
        for _ in range(3):
            batches.append(await world.create(requests_of(*"abcdef")))
            for _ in range(looks):
                await world.look(batches[-1])
            await world.call("POST", "/v1/messages", body())
        world.time += 86_400
        return [(name, list((await world.results(name)).items())) for name in batches], world.provider.bill.total()

    once = await world_of(7, looks=0)
    assert once == await world_of(7, looks=0)
    assert once == await world_of(7, looks=5), "looking more often must not change what happens"
    assert once != await world_of(8, looks=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("constant:2", Constant(2)),
        ("uniform:1,3", Uniform(1, 3)),
        ("uniform:low=1,high=3", Uniform(1, 3)),
        ("lognormal:median=100,sigma=0.5", LogNormal(100, 0.5)),
        ("lognormal:100,0.5,floor=60", LogNormal(100, 0.5, 60)),
        (
            "mixture:0.95*lognormal(100,0.5)+0.05*lognormal(1800,1)",
            Mixture(((0.95, LogNormal(100, 0.5)), (0.05, LogNormal(1800, 1)))),
        ),
    ],
)
def test_latencies_read_from_text(text, expected):
    assert parse_latency(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2",
        "constant:",
        "constant:-1",
        "gamma:1",
        "uniform:1,2,3",
        "lognormal:mean=3",
        "mixture:1*x(1)",
        "mixture:0*constant(1)",
    ],
)
def test_latencies_that_are_none(text):
    with pytest.raises(ValueError, match="is not a latency"):
        parse_latency(text)


def test_latencies_have_the_shape_they_promise():
    def draws(latency: Latency) -> list[float]:
        rng = random.Random(1)
        return sorted(latency.draw(rng) for _ in range(4000))

    assert statistics.median(draws(LogNormal(100, 0.5))) == pytest.approx(100, rel=0.05)
    assert min(draws(LogNormal(100, 0.5, floor=60))) == 60
    assert 1 <= draws(Uniform(1, 3))[0] <= draws(Uniform(1, 3))[-1] <= 3
    tail = draws(parse_latency("mixture:0.95*constant(1)+0.05*constant(50)"))
    assert tail.count(50) / len(tail) == pytest.approx(0.05, abs=0.015)


def test_settings_fail_at_once():
    with pytest.raises(ValueError, match="batch_cache_hit_rate"):
        MockConfig(batch_cache_hit_rate=2)
    with pytest.raises(ValueError, match="mean_output_tokens"):
        MockConfig(mean_output_tokens=0)


def test_the_stand_in_shares_no_code_with_what_it_checks():
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not str(name).startswith("carpool") or str(name).startswith("carpool.mock"), source
                assert name != "time" or source.name == "clock.py", source


async def test_a_hundred_thousand_requests(turned):
    world = turned()
    params = {"model": "claude-haiku-4-5", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
    raw = msgspec.json.encode({"requests": [{"custom_id": f"c{i}", "params": params} for i in range(100_000)]})
    clock = time.process_time  # whatever else this machine is doing
    begun = clock()
    created = (await world.call("POST", "/v1/messages/batches", raw)).json()
    accepted = clock() - begun
    world.time += 1
    begun = clock()
    answer = await world.call("GET", f"/v1/messages/batches/{created['id']}/results")
    streamed = clock() - begun
    assert answer.body.count(b"\n") == 100_000
    assert len(world.provider.bill.charges) == 100_000
    # Measured at about 1 s and 1.3 s; the bounds only catch work that has become quadratic.
    assert accepted < 8
    assert streamed < 8
