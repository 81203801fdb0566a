"""The prompt cache by its published rules."""

import pytest

from carpool.mock import Constant, MockConfig, Uniform

MODEL = "claude-opus-5"  # caches from 512 tokens
LONG, LONGER = "a" * 4000, "b" * 8000  # 1,001 and 2,001 tokens


def marked(text, ttl="5m"):
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": ttl}}


def asking(system, text="hi", **more):
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "max_tokens": 10, "system": system, "messages": messages, **more}


async def use(world, body, key="k"):
    """(uncached, read, written for 5 minutes, written for 1 hour)."""
    answer = await world.call("POST", "/v1/messages", body, key=key)
    assert answer.status == 200, answer.body
    usage = answer.json()["usage"]
    split = usage["cache_creation"]
    world.time += 1
    assert usage["cache_creation_input_tokens"] == sum(split.values())
    return (
        usage["input_tokens"],
        usage["cache_read_input_tokens"],
        split["ephemeral_5m_input_tokens"],
        split["ephemeral_1h_input_tokens"],
    )


async def test_writes_once_then_reads_until_it_lapses(turned):
    world = turned()
    body = asking([marked(LONG)])
    assert await use(world, body) == (1, 0, 1001, 0)
    world.time += 298
    assert await use(world, body) == (1, 1001, 0, 0)
    world.time += 298  # a read has refreshed it
    assert await use(world, body) == (1, 1001, 0, 0)
    world.time += 300
    assert await use(world, body) == (1, 0, 1001, 0)


async def test_one_hour_entries_and_several_breakpoints(turned):
    world = turned()
    body = asking([marked(LONG, "1h"), marked(LONGER)], text="x" * 40)
    assert await use(world, body) == (11, 0, 2001, 1001)
    world.time += 3000
    assert await use(world, body) == (11, 1001, 2001, 0)


async def test_the_longest_stored_prefix_is_read_and_the_rest_written(turned):
    world = turned()
    await use(world, asking([marked(LONG)]))
    assert await use(world, asking([marked(LONG), marked(LONGER)])) == (1, 1001, 2001, 0)
    assert await use(world, asking([marked(LONG), marked(LONGER)])) == (1, 3002, 0, 0)


async def test_a_growing_conversation_reads_by_looking_back_but_only_19_blocks(turned):
    world = turned()

    def turn(blocks):
        content = [{"type": "text", "text": LONG}] + [{"type": "text", "text": str(i)} for i in range(blocks)]
        content[-1]["cache_control"] = {"type": "ephemeral"}
        return {"model": MODEL, "max_tokens": 10, "messages": [{"role": "user", "content": content}]}

    await use(world, turn(5))
    assert (await use(world, turn(24)))[1] == 1006
    assert (await use(world, turn(44)))[1] == 0


async def test_below_the_minimum_nothing_is_cached(turned):
    world = turned()
    short = asking([marked("a" * 2000)])  # 501 tokens
    assert await use(world, short) == (502, 0, 0, 0)
    assert await use(world, short) == (502, 0, 0, 0)


async def test_automatic_caching_marks_the_last_block(turned):
    world = turned()
    body = asking(LONG, text=LONGER, cache_control={"type": "ephemeral", "ttl": "1h"})
    assert await use(world, body) == (0, 0, 0, 3002)
    assert await use(world, body) == (0, 3002, 0, 0)


async def test_what_changes_a_prefix_misses(turned):
    world = turned()
    system, user = [marked(LONG)], {"role": "user", "content": [marked(LONG)]}
    tools = [{"name": "t", "input_schema": {}}]
    body = {"model": MODEL, "max_tokens": 9, "system": system, "messages": [user], "tools": tools}
    written = await use(world, body)
    both = written[2]
    assert (await use(world, {**body, "max_tokens": 8}))[1] == both
    # Other settings of the messages level keep tools and system; other tools keep nothing.
    assert (await use(world, {**body, "tool_choice": {"type": "any"}}))[1] == both - 1001
    assert (await use(world, {**body, "tools": [{"name": "u", "input_schema": {}}]}))[1] == 0
    assert (await use(world, {**body, "model": "claude-sonnet-5-5"}))[1] == 0
    assert (await use(world, body, key="another workspace"))[1] == 0


async def test_parallel_calls_miss_until_the_first_response_has_begun(turned):
    world = turned(MockConfig(batch_latency=Constant(100), batch_execution=Constant(10)))
    requests = [{"custom_id": f"c{i}", "params": asking([marked(LONG, "1h")])} for i in range(3)]
    first = await world.create(requests)
    world.time += 2  # the second batch starts two seconds later, and responses begin after three
    second = await world.create(requests)
    world.time += 2
    third = await world.create(requests)
    world.time += 100

    async def reads(batch_id):
        lines = (await world.results(batch_id)).values()
        return {line["message"]["usage"]["cache_read_input_tokens"] for line in lines}

    # Asked in the wrong order on purpose: what is seen must not depend on when somebody looks.
    assert await reads(third) == {1001}
    assert await reads(second) == {0}
    assert await reads(first) == {0}


async def test_batches_and_synchronous_calls_do_not_share_entries(turned):
    world = turned()
    body = asking([marked(LONG, "1h")])
    await use(world, body)
    for expected in (0, 1001):
        batch_id = await world.create([{"custom_id": "a", "params": body}])
        world.time += 1
        usage = (await world.results(batch_id))["a"]["message"]["usage"]
        assert usage["cache_read_input_tokens"] == expected


async def test_batch_hit_rate_is_the_chance_to_find_what_is_there(turned):
    config = MockConfig(
        batch_latency=Uniform(10, 1000), per_request=True, batch_cache_hit_rate=0.5, mean_output_tokens=1
    )
    world = turned(config)
    body = asking([marked(LONG, "1h")])
    batch_id = await world.create([{"custom_id": f"c{i}", "params": body} for i in range(200)])
    world.time += 1000
    lines = (await world.results(batch_id)).values()
    hits = sum(line["message"]["usage"]["cache_read_input_tokens"] > 0 for line in lines)
    assert 70 <= hits <= 130
    # 1 token in, 1 out; a miss writes 1,001 at twice the price, a hit reads them at a tenth; all at half.
    expected = [(5000 + 25_000) // 2 + 1001 * (500 if hit else 10_000) // 2 for hit in [1] * hits + [0] * (200 - hits)]
    assert world.provider.bill.total() == sum(expected)


@pytest.mark.parametrize(
    "body",
    [
        asking([marked(LONG) for _ in range(5)]),
        asking([marked(LONG) for _ in range(4)], cache_control={"type": "ephemeral"}),
        asking([marked(LONG, "5m"), marked(LONG, "1h")]),
        asking([marked(LONG, "2h")]),
        asking(LONG, cache_control={"type": "eternal"}),
        {
            **asking(LONG),
            "messages": [{"role": "user", "content": [marked("x", "1h")]}],
            "cache_control": {"type": "ephemeral"},
        },
    ],
)
async def test_markers_that_break_the_rules(turned, body):
    world = turned()
    assert (await world.call("POST", "/v1/messages", body)).status == 400
    batch_id = await world.create([{"custom_id": "a", "params": body}])
    world.time += 1
    line = (await world.results(batch_id))["a"]
    assert line["error"]["error"]["type"] == "invalid_request_error"


async def test_requests_of_different_batches_run_in_the_order_of_their_starts(turned):
    world = turned(MockConfig(batch_latency=Uniform(10, 1000), per_request=True))
    prefixes = [asking([marked(str(i) + LONG, "1h")]) for i in range(10)]
    requests = [{"custom_id": f"c{i}", "params": prefixes[i % 10]} for i in range(40)]
    await world.create(requests)
    await world.create(requests)
    world.time += 1000
    # Whichever batch it is in, only the first request with a prefix pays for writing it.
    writers = [charge for charge in world.provider.bill.charges if charge.usage.write_1h]
    assert len(writers) == len(prefixes)
