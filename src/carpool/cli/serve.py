"""`carpool serve`: the proxy on a port."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
import uvicorn
import uvloop
from rich.console import Console

from carpool.capabilities import Capabilities
from carpool.cli.check import check_config
from carpool.cli.crashing import Discreet, keeping_quiet, on_loop
from carpool.cli.listening import Server, address, admin_token, check_keys, exposed, is_local, listen, reached, reserve
from carpool.cli.room import room
from carpool.cli.setting_up import (
    Wires,
    defaults_of,
    gather,
    hook_secrets_of,
    house_keys,
    keys_of,
    lender_of,
    upstreams_of,
)
from carpool.cli.workers import able, supervise
from carpool.clock import SystemClock
from carpool.config import Config
from carpool.config.limits import Limits
from carpool.doors.proxy import Proxy
from carpool.doors.proxy.calling import Note
from carpool.doors.proxy.connection import Connection
from carpool.doors.proxy.hosts import Hosts
from carpool.doors.proxy.logs import Journal, JsonFormatter, as_json, as_text, to_stream
from carpool.doors.proxy.waiting import Patience
from carpool.engine import Engine, Keyring, Upstream
from carpool.errors import CarpoolError, ConfigError
from carpool.stores import open_store
from carpool.stores.remote import Handover, Line, RemoteStore, connect, hosted


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"
    OFF = "off"


KEEP_ALIVE_S = 75  # longer than clients wait between two tries, so that none meets a connection that is just closing
LAST_WORDS_S = 5  # for answers that are being written when everything else has ended


def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine's need keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8787,
    upstream: Annotated[str | None, typer.Option(help="Anthropic's base URL.", envvar="CARPOOL_UPSTREAM")] = None,
    provider: Annotated[
        list[str] | None, typer.Option(help="NAME=URL of a provider, NAME=DIALECT:URL of a new one; may be repeated.")
    ] = None,
    store: Annotated[str | None, typer.Option(help="Where calls are kept: a path or postgresql://…")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with providers, rules and other settings.")] = None,
    tls_cert: Annotated[str | None, typer.Option(help="A certificate in PEM form: serve HTTPS.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="The path of its key.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Check the config, say what holds, and end.")] = False,
    in_json: Annotated[bool, typer.Option("--json", help="With --check: say it in JSON.")] = False,
    request: Annotated[
        Path | None, typer.Argument(help="With --check: a request in JSON, to see what would become of it.")
    ] = None,
    drain: Annotated[float, typer.Option(help="Seconds given to open calls when stopping.", min=0)] = 5.0,
    log_format: Annotated[LogFormat, typer.Option(help="The form of the line that is written for every call.")] = (
        LogFormat.TEXT
    ),
    workers: Annotated[int, typer.Option(help="Processes that share the port and the work.", min=1, max=64)] = 1,
    patience: Annotated[float, typer.Option(help="Scales how long clients wait in silence.", min=0, hidden=True)] = 1.0,
    hub: Annotated[str | None, typer.Option(help="Where a worker finds the others.", hidden=True)] = None,
) -> None:
    """Serve the proxy: point ANTHROPIC_BASE_URL here, and nothing else changes.

    A call without a budget goes straight through. Give one with the header x-carpool-budget: 10m, or in the base URL:
    http://127.0.0.1:8787/@budget=10m

    Calls that wait for a batch survive a stop or a crash: sent again after the restart, they get their own answer.
    """
    if check:
        tls = (tls_cert, tls_key)
        check_config(config, upstream, provider or (), store, request, as_json=in_json, host=host, tls=tls)
        return
    if request is not None or in_json:
        raise ConfigError("A request to look at, and --json, go with --check: carpool serve --check request.json.")
    settled = gather(config, upstream, provider or (), store, (tls_cert, tls_key))
    way = Way(host, log_format, drain, Patience().scaled(patience), _token(host, settled), hub)
    if workers > 1 and hub is None:
        _supervise(workers, port, settled, way)
        return
    with keeping_quiet(), listen(host, port, shared=hub is not None) as listener:
        uvloop.run(_serve(listener, settled, way))


def _supervise(count: int, port: int, config: Config, way: Way) -> None:
    if not able():
        raise ConfigError("--workers needs Linux, where several processes can share a port. Leave it out here.")
    _, end_log = _log(way.log_format)
    with keeping_quiet(), reserve(way.host, port) as holder:
        code = uvloop.run(supervise(count, config, holder.getsockname()[1], lambda: _say(holder, config, way)))
    end_log()
    if code:
        raise typer.Exit(code)


class Way(NamedTuple):
    """How it is served, beside the config."""

    host: str
    log_format: LogFormat
    drain: float
    patience: Patience
    token: str | None
    hub: str | None  # where a worker finds the process that started it


def _token(host: str, config: Config) -> str | None:
    return admin_token(host, config.serving, os.environ)


async def _serve(listener: socket.socket, config: Config, way: Way) -> None:
    asyncio.get_running_loop().set_exception_handler(on_loop)
    clock, wires = SystemClock(), Wires(config.serving, os.environ)
    upstreams = upstreams_of(config, wires.to)
    line = None if way.hub is None else await connect(way.hub)
    engine = await _engine(config, upstreams, clock, way.host, line)
    note, end_log = _log(way.log_format)
    local, alone = is_local(way.host), reached(way.host, config.serving) is None
    proxy = Proxy(
        engine,
        upstreams,
        clock,
        defaults=defaults_of(config),
        on_disconnect=config.policy.on_disconnect,
        patience=way.patience,
        note=note,
        book=config.book,
        keys=keys_of(config, os.environ) if alone else {},  # lent to whoever can run a program here, and nobody else
        keys_required=config.keys_required if config.keys_required is not None else not alone,
        max_body=config.max_body,
        hosts=Hosts(local=local, allowed=config.serving.allowed_hosts, trusted=config.serving.trusted_proxies),
        admin_token=way.token,
        hook_secrets=hook_secrets_of(config, os.environ),
    )

    async def end() -> None:
        await _end(proxy, engine, way.drain)

    def begun() -> None:
        if line is None:
            _say(listener, config, way)
        else:
            line.tell("ready")

    _collect_rarely()
    try:
        server = Server(_config(proxy, room(config.limits)), end, config.serving.tls, begun)
        if line is not None:  # without the process that started it a worker ends
            line.lost.add_done_callback(lambda _: setattr(server, "should_exit", True))
        await server.serve([listener])
    finally:
        await engine.close(0.0)
        await wires.aclose()
        end_log()


async def _engine(
    config: Config, upstreams: Mapping[str, Upstream], clock: SystemClock, host: str, line: Line | None
) -> Engine:
    if line is not None and hosted(config.store):
        store = await RemoteStore.over(line)
    else:
        store = await open_store(config.store, encrypt=config.encrypt)
    keyring = Keyring(store.pepper)
    abilities = Capabilities({one.name: one.models for one in config.providers})
    engine = Engine(
        store=store, clock=clock, upstreams=upstreams, keyring=keyring, policy=config.policy, capabilities=abilities
    )
    await engine.guests.open(lender_of(config, os.environ))
    check_keys(host, config.serving, configured=engine.guests.expected and config.keys_required is not False)
    for provider, secret in house_keys(config, os.environ):  # batches that were bought with them go on
        engine.enrol(provider, secret)
    if line is not None:
        engine.on_secret = Handover(line, engine.enrol).give
    await engine.start()
    return engine


def _collect_rarely() -> None:
    """Calls leave next to nothing behind that only the collector could find, and looking for it costs a sixth of what
    a quick call takes. What was loaded to start with is looked at never again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _say(listener: socket.socket, config: Config, way: Way) -> None:
    places = " and ".join(one.base_url for one in config.providers)
    scheme = "http" if config.serving.tls is None else "https"
    said = f"carpool listens on {address(listener, scheme)} and buys from {places}. Stop it with Ctrl-C."
    console = Console(highlight=False)
    for line in (said, *(f"Note: {note}" for note in (*config.notes, *exposed(way.host, config.serving)))):
        if way.log_format is LogFormat.JSON:
            line = json.dumps({"event": "start", "message": line})
        console.print(line, markup=False, soft_wrap=True)


async def _end(proxy: Proxy, engine: Engine, drain: float) -> None:
    """Open calls get their time; then what waits for a batch is told to come back, and the rest is cut."""
    await proxy.drain(drain)
    await engine.close(0.0)
    await proxy.aclose()


def _log(log_format: LogFormat) -> tuple[Note, Callable[[], None]]:
    """Where the lines of calls go, and how that ends. What goes wrong is said on the other stream."""
    if log_format is LogFormat.JSON:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(Discreet("carpool: %(message)s"))
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("uvicorn.error").addFilter(_unsaid)
    if log_format is LogFormat.OFF:
        return lambda line: None, lambda: None
    journal = Journal(to_stream(sys.stdout), as_json if log_format is LogFormat.JSON else as_text)
    return journal.note, journal.close


def _config(proxy: Proxy, limits: Limits) -> uvicorn.Config:
    return uvicorn.Config(
        proxy,
        http=Connection.within(limits),
        log_config=None,
        log_level="warning",
        lifespan="off",
        ws="none",
        proxy_headers=False,  # who asks is not asked for, so nobody needs to be believed
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )


def _unsaid(record: logging.LogRecord) -> bool:
    """Answers that break off are told by the proxy in a sentence; their traceback tells nothing more."""
    return not (record.exc_info and isinstance(record.exc_info[1], CarpoolError))
