"""`carpool serve`: the proxy on a port."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import typer
import uvicorn
import uvloop

from carpool.cli import flags, listen, process, setup
from carpool.cli.check import refuse_json, run_check
from carpool.cli.console import StoreContents, in_memory, print_errors, say, started, stopped, store_location
from carpool.cli.flags import LogFormat
from carpool.cli.workers import supervise
from carpool.config import Config, ConnectionLimits
from carpool.core.clock import SystemClock
from carpool.core.errors import CarpoolError, ConfigError
from carpool.engine import Engine, Keyring, Upstream
from carpool.engine.background import BackgroundTasks
from carpool.frontends.proxy import Proxy
from carpool.frontends.proxy.http.connection import Connection
from carpool.frontends.proxy.log import (
    EventLogger,
    JsonFormatter,
    LogWriter,
    Noted,
    WriteLogEvent,
    as_json,
    as_text,
    to_stream,
)
from carpool.frontends.proxy.waiting import KeepAliveIntervals
from carpool.planners.access.providers import Hosts
from carpool.planners.routing import Capabilities
from carpool.stores import open_store, peek
from carpool.stores.remote import HubConnection, RemoteStore, SecretSharing, connect, hosted

log = logging.getLogger("carpool.serve")

KEEP_ALIVE_S = 75  # longer than clients wait between retries, so that none uses a connection that is being closed
SHUTDOWN_S = 5  # for responses that are still being written at shutdown


def serve(
    host: flags.Host = "127.0.0.1",
    port: flags.Port = 8787,
    upstream: flags.Upstream = None,
    provider: flags.Providers = None,
    store: flags.Store = None,
    config: flags.ConfigFile = None,
    tls_cert: flags.TlsCert = None,
    tls_key: flags.TlsKey = None,
    check: flags.Check = False,
    everything: flags.All = False,
    in_json: flags.CheckJson = False,
    request: flags.Request = None,
    drain: flags.Drain = 5.0,
    log_format: flags.Log = LogFormat.TEXT,
    workers: flags.WorkerCount = 1,
    patience: flags.PatienceScale = 1.0,
    hub: flags.HubPath = None,
) -> None:
    """Serve the proxy: point ANTHROPIC_BASE_URL here, and nothing else changes.

    A call without a budget goes straight through. Give one with the header x-carpool-budget: 10m, or in the base URL:
    http://127.0.0.1:8787/@budget=10m

    Calls that wait for a batch survive a stop or a crash: sent again after the restart, they get their own answer.
    """
    if not check and (request is not None or in_json or everything):
        raise ConfigError("A request, --all and --json go with --check: carpool serve --check request.json.")
    try:
        settings = setup.gather(config, upstream, provider or (), store, (tls_cert, tls_key))
    except ConfigError as error:
        if not in_json:
            raise
        refuse_json(error)
        raise typer.Exit(2) from error
    errors = setup.problems(settings, host, port, workers) if hub is None else []  # a worker's supervisor checked them
    if check:
        run_check(settings, errors, host, request, everything=everything, as_json=in_json)
        return
    if errors:
        print_errors(errors)
        raise typer.Exit(2)
    options = ServeOptions(host, log_format, drain, KeepAliveIntervals().scaled(patience), hub)
    process.give_back_large_blocks()
    if workers > 1 and hub is None:
        _supervise(settings, options, port, workers)
        return
    with process.no_data_in_crashes(), listen.listen(host, port, shared=hub is not None) as listener:
        uvloop.run(_serve(listener, settings, options))


class ServeOptions(NamedTuple):
    """The parameters of a server that are not in the config."""

    host: str
    log_format: LogFormat
    drain: float
    intervals: KeepAliveIntervals
    hub: str | None  # the socket of the supervising process, for a worker


def _supervise(config: Config, options: ServeOptions, port: int, workers: int) -> None:
    _, end_log = _log(options.log_format)
    begun = False

    def begin(holding: StoreContents) -> None:
        nonlocal begun
        begun = True
        _say_started(holder, config, options, holding)

    with process.no_data_in_crashes(), listen.reserve(options.host, port) as holder:
        code = uvloop.run(supervise(workers, config, holder.getsockname()[1], begin))
    end_log()
    if begun:
        asyncio.run(_say_stopped(config, options))
    if code:
        raise typer.Exit(code)


async def _serve(listener: socket.socket, config: Config, options: ServeOptions) -> None:
    asyncio.get_running_loop().set_exception_handler(process.log_loop_exception)
    clock, http_clients = SystemClock(), setup.HttpClients(config.serving, os.environ)
    upstreams = setup.upstreams_of(config, http_clients.to)
    hub = None if options.hub is None else await connect(options.hub)
    note, end_log = _log(options.log_format)
    engine, holding = await _engine(config, upstreams, clock, options.host, hub, note)
    proxy = _proxy(config, options, engine, upstreams, clock, note)

    def begun() -> None:
        if hub is None:
            _say_started(listener, config, options, holding)
        else:
            hub.notify("ready", *holding)

    process.collect_rarely()
    background = BackgroundTasks()
    background.spawn(process.trim_heap(clock), "trim heap")
    try:
        end = partial(_end, proxy, engine, options.drain)
        limits = process.within_file_limit(config.limits)
        server = listen.ProxyServer(_config(proxy, limits), end, config.serving.tls, begun)
        if hub is not None:  # a worker ends when its supervisor does
            hub.lost.add_done_callback(lambda _: setattr(server, "should_exit", True))
        await server.serve([listener])
    finally:
        background.abort()
        await engine.close(0.0)
        await http_clients.aclose()
        end_log()
    if hub is None:
        await _say_stopped(config, options)


def _proxy(
    config: Config,
    options: ServeOptions,
    engine: Engine,
    upstreams: Mapping[str, Upstream],
    clock: SystemClock,
    note: Callable[[Noted], None],
) -> Proxy:
    local, alone = listen.is_local(options.host), listen.reached(options.host, config.serving) is None
    return Proxy(
        engine,
        upstreams,
        clock,
        defaults=setup.defaults_of(config),
        on_disconnect=config.policy.on_disconnect,
        intervals=options.intervals,
        note=note,
        write_event=note,
        book=config.book,
        # The provider keys of `api_key_env` are for local clients only.
        keys={name: secret[0] for name, secret in setup.configured_keys(config, os.environ).items()} if alone else {},
        keys_required=config.keys_required if config.keys_required is not None else not alone,
        max_body=config.max_body,
        hosts=Hosts(local=local, allowed=config.serving.allowed_hosts, trusted=config.serving.trusted_proxies),
        admin_token=listen.admin_token(options.host, config.serving, os.environ),
        hook_secrets=setup.hook_secrets_of(config, os.environ),
    )


async def _engine(
    config: Config,
    upstreams: Mapping[str, Upstream],
    clock: SystemClock,
    host: str,
    hub: HubConnection | None,
    write_event: WriteLogEvent,
) -> tuple[Engine, StoreContents]:
    if hub is not None and hosted(config.store):
        store = await RemoteStore.over(hub)
    else:
        store = await open_store(config.store, encrypt=config.encrypt)
    counts = await store.counts()
    keyring = Keyring(store.pepper)
    abilities = Capabilities({provider.name: provider.models for provider in config.providers})
    engine = Engine(
        store=store,
        clock=clock,
        upstreams=upstreams,
        keyring=keyring,
        policy=config.policy,
        hooks=(EventLogger(write_event),),
        capabilities=abilities,
    )
    try:
        await engine.virtual_key_cache.open(setup.secret_lookup_of(config, os.environ))
        listen.check_keys(
            host, config.serving, configured=engine.virtual_key_cache.expected and config.keys_required is not False
        )
        for provider, secret in setup.configured_keys(config, os.environ).items():  # to continue their batches
            engine.add_secret(provider, secret)
        if hub is not None:
            engine.on_secret = SecretSharing(hub, engine.add_secret).give
        await engine.start()
    except BaseException:
        engine.virtual_key_cache.stop()
        await store.aclose()
        raise
    return engine, StoreContents.of(counts, await engine.overview.keyless())


def _say_started(listener: socket.socket, config: Config, options: ServeOptions, holding: StoreContents) -> None:
    as_json = options.log_format is LogFormat.JSON
    place = listen.address(listener, "http" if config.serving.tls is None else "https")
    providers = {provider.name: provider.base_url for provider in config.providers}
    facts = {
        "address": place,
        "providers": providers,
        "store": store_location(config.store),
        "found": holding._asdict(),
    }
    say(started(place, config, holding), "start", facts, as_json=as_json)
    for note in (*config.notes, *listen.exposed(options.host, config.serving)):
        say([f"Note: {note}"], "note", {}, as_json=as_json)


async def _say_stopped(config: Config, options: ServeOptions) -> None:
    """Say what remains in the store. A failure to read it must not turn a clean exit into an error."""
    try:
        holding = None if in_memory(config.store) else StoreContents.of((await peek(config.store))[1])
    except CarpoolError as error:
        log.warning("%s", error)
        holding = None
    facts = {"store": store_location(config.store), "left": None if holding is None else holding._asdict()}
    say(stopped(config, holding), "stop", facts, as_json=options.log_format is LogFormat.JSON)


async def _end(proxy: Proxy, engine: Engine, drain: float) -> None:
    """Give open calls time to finish; then tell clients that wait for a batch to retry, and cut off the rest."""
    await proxy.drain(drain)
    await engine.close(0.0)
    await proxy.aclose()


def _log(log_format: LogFormat) -> tuple[Callable[[Noted], None], Callable[[], None]]:
    """The writer of the call log, and its close function. Errors go to the other stream."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter() if log_format is LogFormat.JSON else process.SafeFormatter("carpool: %(message)s")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("uvicorn.error").addFilter(_not_broken_off)
    if log_format is LogFormat.OFF:
        return lambda line: None, lambda: None
    journal = LogWriter(to_stream(sys.stdout), as_json if log_format is LogFormat.JSON else _as_text)
    return journal.note, journal.close


def _as_text(line: Noted) -> str:
    """Format a line; on a terminal it is cut to one row."""
    return as_text(line, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)


def _config(proxy: Proxy, limits: ConnectionLimits) -> uvicorn.Config:
    return uvicorn.Config(
        proxy,
        http=Connection.within(limits),
        log_config=None,
        log_level="warning",
        lifespan="off",
        ws="none",
        proxy_headers=False,  # the client's address is not used, so forwarded headers need no trust
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )


def _not_broken_off(record: logging.LogRecord) -> bool:
    """Hide tracebacks of responses that break off: the proxy already logs them."""
    return not (record.exc_info and isinstance(record.exc_info[1], CarpoolError))
