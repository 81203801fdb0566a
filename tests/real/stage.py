"""The mock provider and `carpool serve`, both as processes of their own, and clients as children beside them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx2

HERE = Path(__file__).resolve().parent
PATIENCE_S = 120.0
QUICK = {"batch_latency": "constant:0.4"}
PACE = "batching: {linger_ms: 300, poll_interval_s: 0.2}\n"
# What a client must not inherit: other people's keys, addresses and proxies.
FOREIGN = (
    "ANTHROPIC_",
    "OPENAI_",
    "GROQ_",
    "MISTRAL_",
    "CLAUDE",
    "CODEX_",
    "OPENCODE",
    "INSPECT_",
    "LANGCHAIN_",
    "LANGSMITH_",
    "LITELLM_",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "CARPOOL_",
)


class Trouble(Exception):
    """A client did not get what it should have got."""


def expect(true: object, sentence: str) -> None:
    if not true:
        raise Trouble(sentence)


@dataclass(frozen=True)
class Done:
    """How a client's process ended."""

    code: int
    out: str
    err: str

    def ok(self) -> Done:
        expect(self.code == 0, f"it ended with {self.code}: {(self.err or self.out).strip()[-800:]}")
        return self


@dataclass(frozen=True)
class ResponseEnd:
    """What the provider knows of one credential."""

    charges: list[dict[str, Any]]
    batches: list[dict[str, Any]]
    asked: list[dict[str, Any]]
    ledger: list[dict[str, Any]]  # carpool's own, by lane and kind

    def posts(self, path: str) -> int:
        return sum((one["method"], one["path"]) == ("POST", path) for one in self.asked)


@dataclass
class Stage:
    url: str
    direct: str
    folder: Path
    http: httpx2.AsyncClient
    vendors: Mapping[str, str] = field(default_factory=dict)  # where the mock of each listens

    def at(self, options: str = "") -> str:
        return f"{self.url}/{options}" if options else self.url

    async def seen(self, credential: str) -> ResponseEnd:
        mine: dict[str, list[Any]] = {"charges": [], "batches": [], "asked": []}
        for direct in (self.direct, *self.vendors.values()):
            shown = (await self.http.get(f"{direct}/_window")).json()
            for name, rows in mine.items():
                rows += [one for one in shown[name] if one["credential"] == credential]
        return ResponseEnd(**mine, ledger=await self.ledger(credential))

    async def ledger(self, credential: str) -> list[dict[str, Any]]:
        """What carpool paid for this key: one credential, whichever header it was sent in."""
        shown = await self.http.get(f"{self.url}/carpool/stats", headers={"x-api-key": credential})
        lanes: list[dict[str, Any]] = shown.json()["lanes"]
        return lanes

    async def script(self, fault: str, times: int = 1) -> None:
        (await self.http.post(f"{self.direct}/_window/script?fault={fault}&times={times}")).raise_for_status()

    def room(self, name: str) -> Path:
        """An empty directory to run a client in; all rooms share a home that is nobody's."""
        folder = self.folder / "rooms" / name
        folder.mkdir(parents=True)
        (folder.parent / "home").mkdir(exist_ok=True)
        return folder


@asynccontextmanager
async def staged(
    folder: Path,
    settings: Mapping[str, Any] = QUICK,
    options: Sequence[str] = (),
    config: str = PACE,
    vendors: Sequence[str] = (),
) -> AsyncIterator[Stage]:
    """Both processes on free ports, with a fresh store; and one more for each OpenAI-compatible provider."""
    write(folder / "carpool.yaml", config)
    async with AsyncExitStack() as stack:
        others = {}
        for name in vendors:
            said = provider_command(dict(settings) | {"vendor": name})
            others[name] = await stack.enter_async_context(child(folder / f"{name}.log", *said))
        written = write(folder / "carpool.yaml", config + listed(others))
        direct = await stack.enter_async_context(child(folder / "provider.log", *provider_command(settings)))
        serve = [sys.executable, "-m", "carpool", "serve", "--port", "0", "--store", str(folder / "carpool.db")]
        serve += ["--config", written, "--upstream", direct]
        serve += ["--provider", f"openai={direct}/v1", *options]
        said = await stack.enter_async_context(child(folder / "serve.log", *serve))
        http = await stack.enter_async_context(httpx2.AsyncClient(timeout=30))
        yield Stage(said.split(" listens on ")[1].split()[0], direct, folder, http, others)


def provider_command(settings: Mapping[str, Any]) -> list[str]:
    return [sys.executable, str(HERE / "provider.py"), json.dumps(dict(settings))]


def listed(vendors: Mapping[str, str]) -> str:
    """The vendors as a config has them. Flex is off at Groq unless it is asked for."""
    rows = [f"  {name}: {{base_url: {url!r}, models: {{'*': {{flex: true}}}}}}\n" for name, url in vendors.items()]
    return "".join(["providers:\n", *rows]) if rows else ""


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


@asynccontextmanager
async def child(log: Path, *command: str) -> AsyncIterator[str]:
    """A server, known by the first line that it says. What else it says goes into its log."""
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=file, env=environment()
        )
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode().strip()
        rest = asyncio.ensure_future(copy(process.stdout, file))
        try:
            expect(said, f"{' '.join(command[:4])} did not start; see {log}")
            yield said
        finally:
            await end(process)
            await rest


async def copy(source: asyncio.StreamReader, target: IO[bytes]) -> None:
    while part := await source.read(65536):
        target.write(part)


async def end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), 15)
    except TimeoutError:
        process.kill()
        await process.wait()


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.upper().startswith(FOREIGN)}
    return {**clean, "NO_PROXY": "127.0.0.1", **more}


async def run(command: Sequence[str | Path], room: Path, go: str = "", seconds: float = PATIENCE_S, **env: str) -> Done:
    """A client as a process of its own, in a room of its own. Where it waits for a word to begin, `go` is that word."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=room,
        env=environment(HOME=str(room.parent / "home"), PWD=str(room), **env),  # opencode goes by PWD
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        limit=2**24,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(go.encode()), seconds)
    except TimeoutError:
        raise Trouble(f"it did not end within {seconds:g} s") from None
    finally:
        with suppress(ProcessLookupError):  # what it started ends with it
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    (room / "out.txt").write_bytes(out)
    (room / "err.txt").write_bytes(err)
    return Done(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))
