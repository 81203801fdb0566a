"""Webhooks: signed, lost, doubled, late, and tried again."""

import asyncio
import json
from contextlib import asynccontextmanager

import openai
import pytest

from carpool.mock import Constant, Faults, MockAnthropic, MockConfig, OpenAIConfig


class Receiver:
    """Takes webhooks over HTTP; the first of them may be refused."""

    def __init__(self, refuse=0):
        self.got = []
        self.refused = 0
        self._refuse = refuse
        self._changed = asyncio.Condition()

    async def app(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *rest = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        body = await reader.readexactly(int(headers["content-length"]))
        status = b"503 No" if self.refused < self._refuse else b"200 OK"
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()
        async with self._changed:
            if status.startswith(b"503"):
                self.refused += 1
            else:
                self.got.append((first, headers, body))
            self._changed.notify_all()

    async def until(self, count):
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.got) >= count)
        return self.got


@asynccontextmanager
async def receiving(refuse=0):
    receiver = Receiver(refuse)
    server = await asyncio.start_server(receiver.app, "127.0.0.1", 0)
    async with server:
        receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/carpool/hooks/openai?x=1"
        yield receiver


async def started(client, lines, as_jsonl):
    file = await client.files.create(file=("in.jsonl", as_jsonl(lines)), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return batch.id


async def test_an_event_that_the_sdk_believes(openai_connected, lines_of, as_jsonl):
    async with receiving() as receiver, openai_connected() as (server, client):
        server.provider.tell(receiver.url)
        secret = server.provider.config.openai.webhook_secret
        done = await started(client, [lines_of("a")], as_jsonl)
        ((first, headers, body),) = await receiver.until(1)
        assert first == "POST /carpool/hooks/openai?x=1 HTTP/1.1"
        event = client.webhooks.unwrap(body, headers, secret=secret)
        assert (event.type, event.data.id, event.id) == ("batch.completed", done, headers["webhook-id"])
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(body + b" ", headers, secret=secret)
        failed = await started(client, [lines_of("a"), lines_of("a")], as_jsonl)
        event = client.webhooks.unwrap((await receiver.until(2))[1][2], receiver.got[1][1], secret=secret)
        assert (event.type, event.data.id) == ("batch.failed", failed)


async def test_cancelled_and_ended_by_hand(openai_connected, lines_of, as_jsonl):
    config = MockConfig(batch_latency=Constant(3600))
    async with receiving() as receiver, openai_connected(config) as (server, client):
        server.provider.tell(receiver.url)
        first = await started(client, [lines_of("a")], as_jsonl)
        await client.batches.cancel(first)
        await receiver.until(1)
        second = await started(client, [lines_of("a")], as_jsonl)
        server.provider.end_batch(second)
        said = [json.loads(body) for _, _, body in await receiver.until(2)]
        assert [(one["type"], one["data"]["id"]) for one in said] == [
            ("batch.cancelled", first),
            ("batch.completed", second),
        ]


async def test_lost_and_doubled(openai_connected, lines_of, as_jsonl):
    async with receiving() as receiver, openai_connected() as (server, client):
        server.provider.tell(receiver.url)
        server.provider.script("hook_lost")
        lost = await started(client, [lines_of("a")], as_jsonl)
        server.provider.end_batch(lost)
        server.provider.script("hook_double")
        doubled = await started(client, [lines_of("a")], as_jsonl)
        got = await receiver.until(2)
        assert {json.loads(body)["data"]["id"] for _, _, body in got} == {doubled}
        assert len({headers["webhook-id"] for _, headers, _ in got}) == 1


async def test_what_is_not_taken_comes_again(openai_connected, lines_of, as_jsonl):
    config = MockConfig(openai=OpenAIConfig(webhook_backoff_s=0.01))
    async with receiving(refuse=2) as receiver, openai_connected(config) as (server, client):
        server.provider.tell(receiver.url)
        await started(client, [lines_of("a")], as_jsonl)
        await receiver.until(1)
        assert [one.status for one in server.provider.hooks_sent[:2]] == [503, 503]
        assert len({one.event_id for one in server.provider.hooks_sent}) == 1


def test_hours_of_virtual_time(virtual_loop, openai_turned, lines_of):
    async def day():
        loop = asyncio.get_running_loop()
        world = openai_turned()
        now = lambda: 1_800_000_000 + loop.time()  # noqa: E731
        faults = Faults(hook_late_s=600)
        options = OpenAIConfig(webhook_url="http://carpool.test/hook", webhook_latency=Constant(2))
        config = MockConfig(batch_latency=Constant(3600), faults=faults, openai=options)
        world.provider = MockAnthropic(config, now=now)
        got = asyncio.Queue()

        async def post(url, headers, body):
            got.put_nowait((now(), headers["webhook-timestamp"]))
            return 200

        carrying = asyncio.create_task(world.provider.carry_hooks(post))
        await world.start([lines_of("a")])
        first = await got.get()
        world.provider.script("hook_late")
        await world.start([lines_of("a")])
        second = await got.get()
        stuck = await world.start([lines_of("a")])
        world.provider.hold_batch(stuck)
        third = await got.get()
        carrying.cancel()
        return [at for at, _ in (first, second, third)], [one.type for one in world.provider.hooks_sent]

    with asyncio.Runner(loop_factory=virtual_loop) as runner:
        times, types = runner.run(day())
    begun = 1_800_000_000
    assert times == pytest.approx([begun + 3602, begun + 2 * 3602 + 600, begun + 2 * 3602 + 600 + 86_402], abs=1)
    assert types == ["batch.completed", "batch.completed", "batch.expired"]
