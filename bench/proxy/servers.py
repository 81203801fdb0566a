"""Starting and stopping what listens: the contestants on one core, the provider and its load on the other."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from bodies import HEADERS, MARK, answers, request

HERE = Path(__file__).resolve().parent
CONTESTANT_CORE, LOAD_CORE = "0", "1"
START_S = 120.0

NGINX = """
daemon off; worker_processes 1; user root; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; tcp_nodelay on; keepalive_requests 1000000000; keepalive_timeout 600s; client_body_buffer_size 64k;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  {inside}
}}
"""
PROVIDER = """
  server {{
    listen 127.0.0.1:{port} backlog=4096; default_type application/json;
    {locations}
  }}
"""
REVERSE_PROXY = """
  upstream provider {{ server {upstream}; keepalive 512; keepalive_requests 1000000000; keepalive_timeout 600s; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://provider; proxy_http_version 1.1; proxy_set_header Connection ""; }}
  }}
"""
PIECE = 3000  # nginx takes no longer word in its config


class Trouble(Exception):
    """The benchmark can't go on; the text says why."""


@dataclass(frozen=True)
class Running:
    url: str
    process: psutil.Process
    log: Path

    def family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def cpu_s(self) -> float:
        return sum(sum(one.cpu_times()[:2]) for one in self.family())

    def rss(self) -> int:
        return sum(one.memory_info().rss for one in self.family())

    def last_words(self) -> str:
        lines = self.log.read_text("utf-8", "replace").strip().splitlines()
        return "\n".join(lines[-8:]) or "(it said nothing)"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def pinned(core: str, command: list[str]) -> list[str]:
    return ["taskset", "-c", core, *command]


def nginx(folder: Path, inside: str) -> list[str]:
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, inside=inside), "utf-8")
    return ["nginx", "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)]


def provider(folder: Path, port: int) -> list[str]:
    """nginx that answers every call with the same bytes."""
    parts = []
    for number, (path, body) in enumerate(answers().items()):
        text = body.decode()
        pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        sets = " ".join(f"set $part{number}_{place} '{piece}';" for place, piece in enumerate(pieces))
        whole = "".join(f"${{part{number}_{place}}}" for place in range(len(pieces)))
        parts.append(f'location = {path} {{ {sets} return 200 "{whole}"; }}')
    return nginx(folder, PROVIDER.format(port=port, locations="\n    ".join(parts)))


def streaming_provider(folder: Path, port: int) -> list[str]:
    return [sys.executable, str(HERE / "stream.py"), str(port)]


def reverse_proxy(folder: Path, port: int, upstream: str) -> list[str]:
    return nginx(folder, REVERSE_PROXY.format(port=port, upstream=upstream.removeprefix("http://")))


@contextmanager
def running(
    name: str, command: list[str], url: str, core: str, folder: Path, path: str, env: Mapping[str, str]
) -> Iterator[Running]:
    """A server that has answered its first call; gone with all its children afterwards."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(pinned(core, command), stdout=out, stderr=out, cwd=folder, env=dict(env))
    server = Running(url, psutil.Process(process.pid), log)
    try:
        wait_for(name, server, process, path)
        yield server
    finally:
        stop(server, process)


def wait_for(name: str, server: Running, process: subprocess.Popen[bytes], path: str) -> None:
    latest, until = "nothing listened", time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise Trouble(
                f"{name} ended with code {process.returncode} before its first answer:\n{server.last_words()}"
            )
        try:
            status, body = ask(server.url, path)
        except (OSError, http.client.HTTPException) as error:
            latest = f"{type(error).__name__}: {error}"
        else:
            if status == 200 and MARK in body:
                return
            latest = f"status {status}: {body[:300]}"
        time.sleep(0.1)
    raise Trouble(
        f"{name} gave no good answer within {START_S:.0f} s ({latest}). Its last words:\n{server.last_words()}"
    )


def ask(url: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request("POST", path, request(path), HEADERS)
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", "replace")
    finally:
        connection.close()


def stop(server: Running, process: subprocess.Popen[bytes]) -> None:
    family = server.family() if process.poll() is None else []
    for one in family[:1]:
        one.terminate()
    _, left = psutil.wait_procs(family, timeout=10)
    for one in left:
        one.kill()
    process.wait()


def last_json(text: str) -> dict[str, float]:
    lines = [line for line in text.strip().splitlines() if line.startswith("{")]
    if not lines:
        raise Trouble(f"No figures were printed, but this: {text[-500:]}")
    return dict(json.loads(lines[-1]))
