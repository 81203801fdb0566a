"""Ten thousand hostile requests against `carpool serve` in a process of its own. More with CARPOOL_HOSTILE=100000."""

import asyncio
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from tests.support.hostile import Attack, answer, attacks, post
from tests.support.sockets import Message, Peer, ask, provider, read_message

COUNT = int(os.environ.get("CARPOOL_HOSTILE", "10000"))
AT_A_TIME = 24
HELD = 200  # lines that are held at a time, at most
PATIENCE = 30
SLACK = 48 * 2**20  # bytes of memory
ANSWER = json.dumps(
    {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-haiku-4-5",
        "content": [],
        "usage": {"input_tokens": 1, "output_tokens": 2},
    }
).encode()
SAID = ("carpool: A response breaks off after its head: ", "carpool: odd: ")  # the odd provider's doing
CONFIG = """
providers:
  anthropic: {{dialect: anthropic, base_url: "{plain}", default: true}}
  odd: {{dialect: anthropic, base_url: "{odd}"}}
limits: {{max_body_mb: 1, slow_sender_s: 2, slow_reader_s: 4}}
batching: {{linger_ms: 20, poll_interval_s: 0.2, rpm: 100000}}
"""


async def odd(peer: Peer) -> None:
    """A provider that is hostile too."""
    request = await peer.request()
    peer.heard.clear()
    await peer.say(answer(int(request.header("x-seed")[0])))


class Plain:
    """A provider that takes everything, whatever it is: what passes carpool is not its concern. Batches end at once."""

    def __init__(self) -> None:
        self.batches: dict[str, list[bytes]] = {}

    async def __call__(self, peer: Peer) -> None:
        while True:
            request = await peer.request()
            peer.heard.clear()
            content = self._answer(*request.first.split(" ")[:2], request.body)
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            await peer.say(head % len(content), b"" if request.first.startswith("HEAD ") else content)

    def _answer(self, method: str, path: str, body: bytes) -> bytes:
        if not path.startswith("/v1/messages/batches"):
            return ANSWER
        if method == "POST":
            name = f"msgbatch_{len(self.batches)}"
            self.batches[name] = re.findall(rb'"custom_id":\s*"([^"]+)"', body)
            return json.dumps(self._view(name)).encode()
        if path.endswith("/results"):
            lines = b'{"custom_id":"%b","result":{"type":"succeeded","message":%b}}\n'
            return b"".join(lines % (name, ANSWER) for name in self.batches[path.split("/")[4]])
        if (name := path.rpartition("/")[2]) in self.batches:
            return json.dumps(self._view(name)).encode()
        listed = [self._view(name) for name in reversed(self.batches)]
        return json.dumps({"data": listed[:1000], "has_more": False}).encode()

    def _view(self, name: str) -> dict[str, object]:
        at = "2026-11-16T03:00:00Z"
        counts = {"succeeded": len(self.batches[name])}
        view = {"id": name, "processing_status": "ended", "request_counts": counts, "created_at": at}
        return view | {"expires_at": "2036-11-16T03:00:00Z", "ended_at": at, "results_url": "there"}


class Target:
    """The server under attack."""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self.process = process
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.wrong: list[str] = []
        self.held: list[asyncio.Task[None]] = []

    async def suffer(self, attack: Attack) -> None:
        if attack.half and len(self.held) < HELD:
            self.held.append(asyncio.create_task(self._hold(attack)))
            return
        try:
            message = await self._meet(attack)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.statuses[attack.kind, 0] += 1
            return
        except TimeoutError:
            self.wrong.append(f"{attack.kind} was not answered: {attack.data[:300]!r}")
            return
        self.statuses[attack.kind, message.status] += 1
        self.wrong += [f"{attack.kind}: {sentence} {attack.data[:300]!r}" for sentence in _wrong(attack, message)]

    async def _meet(self, attack: Attack) -> Message:
        """Who has sent all that it has to say, says so, and waits for what is said to it."""
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**22)
            try:
                writer.write(attack.data)
                return await _answered(reader, attack)
            finally:
                writer.transport.abort()

    async def _hold(self, attack: Attack) -> None:
        """Says half, and waits until it is cut."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(attack.data)
            async with asyncio.timeout(PATIENCE):
                while await reader.read(65536):
                    continue
        except ConnectionError:
            return
        except TimeoutError:
            self.wrong.append(f"Half a request was never cut: {attack.data!r}")
        finally:
            writer.transport.abort()

    def memory(self) -> int:
        return int(self.process.memory_info().rss)


async def _answered(reader: asyncio.StreamReader, attack: Attack) -> Message:
    """The answer; or, of bytes that may be no whole request, what comes within a moment."""
    whole = attack.good or attack.odd
    try:
        async with asyncio.timeout(PATIENCE if whole else 0.15):
            return await read_message(reader, bodiless=attack.data.startswith(b"HEAD "))
    except TimeoutError:
        if whole:
            raise
        raise ConnectionResetError from None


def _wrong(attack: Attack, message: Message) -> Iterator[str]:
    status = message.status
    if attack.good and status not in (200, 202):
        yield f"was answered with {status}."
    if status >= 500 and not (attack.odd and status in (502, 503, 504)) and status != 501:
        yield f"got a {status} of our own: {message.body[:200]!r}."
    if 400 <= status < 500 and message.whole and message.body:
        try:
            said = json.loads(message.body)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            yield f"got a {status} that no SDK understands: {message.body[:200]!r}."
        else:
            if not said.strip():
                yield f"got a {status} that says nothing."
    if status == 429 and not message.header("retry-after"):
        yield "got a 429 that does not say when to come back."


@asynccontextmanager
async def under_attack(folder: Path) -> AsyncIterator[tuple[Target, Path]]:
    said = folder / "stderr"
    async with provider(Plain()) as (plain_url, _), provider(odd) as (odd_url, _):
        (folder / "carpool.yaml").write_text(CONFIG.format(plain=plain_url, odd=odd_url))
        command = [
            "-m",
            "carpool",
            "serve",
            "--port",
            "0",
            "--log-format",
            "off",
            "--store",
            str(folder / "carpool.db"),
        ]
        with said.open("wb") as stderr:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                "--config",
                str(folder / "carpool.yaml"),
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
            )
        try:
            assert child.stdout is not None
            line = (await child.stdout.readline()).decode()
            assert "listens on" in line, said.read_text()
            yield Target(line.split(" listens on ")[1].split()[0], psutil.Process(child.pid)), said
        finally:
            if child.returncode is None:
                child.terminate()
            await child.communicate()


async def test_hostile_requests_change_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("CARPOOL_SEED", random.randrange(10**6)))
    print(f"seed {seed}")
    async with under_attack(tmp_path) as (target, said):
        queue = iter(enumerate(attacks(seed, COUNT)))
        memory: list[int] = []

        async def worker() -> None:
            for number, attack in queue:
                await target.suffer(attack)
                if number % 100 == 0:
                    memory.append(target.memory())
                    assert (await ask(target.url, post())).status == 200  # in the middle of it all

        files = target.process.num_fds()
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_A_TIME):
                group.create_task(worker())
        await asyncio.gather(*target.held)
        assert (await ask(target.url, post())).status == 200
        async with asyncio.timeout(PATIENCE):
            while target.process.num_fds() > files + 2 * AT_A_TIME:  # noqa: ASYNC110  connections to providers rest for a while
                await asyncio.sleep(0.2)
        kinds = {kind for kind, _ in target.statuses}
        print(sorted(Counter(status for _, status in target.statuses.elements()).items()), f"{len(kinds)} kinds")
    assert not target.wrong, f"{len(target.wrong)} of seed {seed}:\n" + "\n".join(target.wrong[:10])
    complaints = [line for line in said.read_text().splitlines() if not line.startswith(SAID)]
    assert not complaints, f"seed {seed}:\n" + "\n".join(complaints[:60])
    tenth = max(1, len(memory) // 5)
    before, after = max(memory[tenth : 2 * tenth]), min(memory[-tenth:])
    print("memory in MB:", [round(one / 2**20) for one in memory[:: max(1, len(memory) // 20)]])
    assert after < before + SLACK
