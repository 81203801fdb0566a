"""`carpool serve` where others can reach it: TLS, keys, the admin token, and what its process shows."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from anthropic import AsyncAnthropic

from carpool.cli.listen import tls_context
from carpool.config import Tls
from carpool.core.keys import new_key
from carpool.mock import Constant, MockConfig, expected_text, serve
from carpool.stores import open_store
from tests.support.certificates import make_certificate
from tests.support.stage import ask

TOKEN = "an-admin-token-for-these-tests"
UPSTREAM_KEY = "sk-ant-of-the-house"
CALL = {"anthropic-version": "2023-06-01"}


class Child:
    def __init__(self, process: asyncio.subprocess.Process, said: str) -> None:
        self.process = process
        self.url = said.split(" listens on ")[1].split()[0].replace("0.0.0.0", "127.0.0.1")


@asynccontextmanager
async def child(folder: Path, *options: str, **environ: str) -> AsyncIterator[Child]:
    command = ["-m", "carpool", "serve", "--port", "0", "--store", str(folder / "carpool.db"), *options]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=pipe, stderr=pipe, env={**os.environ, **environ}, cwd=folder
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        said = (await process.stdout.readline()).decode()
        assert " listens on " in said, await process.stderr.read()
        yield Child(process, said)
        process.terminate()
        async with asyncio.timeout(10):
            await process.communicate()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def refused(folder: Path, *options: str, **environ: str) -> str:
    """Why it does not start."""
    command = [sys.executable, "-m", "carpool", "serve", "--port", "0", "--store", str(folder / "carpool.db"), *options]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environ}, cwd=folder, timeout=60
    )
    assert ran.returncode == 2, (ran.stdout, ran.stderr)
    assert "listens on" not in ran.stdout
    assert all(line.startswith("carpool: ") for line in ran.stderr.splitlines()), ran.stderr
    return ran.stderr


async def with_a_key(folder: Path) -> str:
    """A store that knows one virtual key; the key."""
    store = await open_store(folder / "carpool.db")
    key, secret = new_key(store.pepper, "ci", "anthropic", "HOUSE_KEY", now=1.8e9)
    await store.write_keys([key])
    await store.aclose()
    return secret


# ---------------------------------------------------------------- where others can reach it


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "carpool.example.com"])
def test_it_does_not_start_without_a_token(tmp_path: Path, host: str) -> None:
    said = refused(tmp_path, "--host", host, CARPOOL_ADMIN_TOKEN="")
    assert f"{host} can be reached from outside" in said
    assert "admin token into CARPOOL_ADMIN_TOKEN" in said


@pytest.mark.parametrize("token", ["short", "ümlaut-ümlaut-ümlaut", "x" * 15])
def test_it_does_not_start_with_a_poor_token(tmp_path: Path, token: str) -> None:
    for host in ("0.0.0.0", "127.0.0.1"):
        said = refused(tmp_path, "--host", host, CARPOOL_ADMIN_TOKEN=token)
        assert "at least 16 plain characters" in said
        assert token not in said


def test_it_does_not_start_without_keys(tmp_path: Path) -> None:
    said = refused(tmp_path, "--host", "0.0.0.0", CARPOOL_ADMIN_TOKEN=TOKEN)
    assert "nobody has a key yet" in said
    assert "carpool keys add" in said
    assert TOKEN not in said


async def test_it_does_not_start_where_keys_are_not_asked_for(tmp_path: Path) -> None:
    await with_a_key(tmp_path)
    said = refused(tmp_path, "--host", "0.0.0.0", CARPOOL_ADMIN_TOKEN=TOKEN, CARPOOL_KEYS__REQUIRED="false")
    assert "leave keys.required on" in said


async def test_with_keys_and_a_token_it_serves_others(tmp_path: Path) -> None:
    virtual = await with_a_key(tmp_path)
    config = tmp_path / "carpool.yaml"
    environ = {"CARPOOL_ADMIN_TOKEN": TOKEN, "HOUSE_KEY": UPSTREAM_KEY}
    async with serve(MockConfig()) as mock, httpx2.AsyncClient(timeout=20) as http:
        config.write_text(f"providers: {{anthropic: {{base_url: '{mock.url}', api_key_env: HOUSE_KEY}}}}")
        async with child(tmp_path, "--host", "0.0.0.0", "--config", str(config), **environ) as one:
            pages = f"{one.url}/carpool"
            assert (await http.get(f"{pages}/healthz", headers={"host": "any.example"})).status_code == 200
            assert (await http.get(f"{pages}/stats")).status_code == 401
            assert (await http.get(f"{pages}/stats", headers={"x-carpool-admin": TOKEN})).status_code == 200
            call, messages = ask("hello"), f"{one.url}/v1/messages"
            for key in (None, UPSTREAM_KEY, "cpk-" + "x" * 43):  # nothing is lent to those who bring no key of ours
                headers = CALL if key is None else CALL | {"x-api-key": key}
                assert (await http.post(messages, json=call, headers=headers)).status_code == 401
            answer = await http.post(messages, json=call, headers=CALL | {"x-api-key": virtual})
            assert answer.status_code == 200
        assert mock.provider.bill.total() > 0


@pytest.mark.parametrize("front", ["127.0.0.1", "10.0.0.0/8"])
async def test_a_server_in_front_brings_others_also_to_loopback(tmp_path: Path, front: str) -> None:
    environ = {"CARPOOL_SERVER__TRUSTED_PROXIES": f"[{front}]", "CARPOOL_ADMIN_TOKEN": ""}
    assert "through the server in front" in refused(tmp_path, **environ)
    assert "nobody has a key yet" in refused(tmp_path, **environ | {"CARPOOL_ADMIN_TOKEN": TOKEN})
    await with_a_key(tmp_path)
    environ |= {"CARPOOL_ADMIN_TOKEN": TOKEN, "CARPOOL_PROVIDERS__ANTHROPIC__API_KEY_ENV": "HOUSE_KEY"}
    async with serve(MockConfig()) as mock, httpx2.AsyncClient(timeout=20) as http:
        async with child(tmp_path, "--upstream", mock.url, **environ, HOUSE_KEY=UPSTREAM_KEY) as one:
            answer = await http.post(f"{one.url}/v1/messages", json=ask("hello"), headers=CALL)
            assert answer.status_code == 401
        assert mock.provider.bill.total() == 0


async def test_nothing_is_lent_to_what_a_server_in_front_passes_on(tmp_path: Path) -> None:
    environ = {"CARPOOL_PROVIDERS__ANTHROPIC__API_KEY_ENV": "HOUSE_KEY", "HOUSE_KEY": UPSTREAM_KEY}
    async with (
        serve(MockConfig()) as mock,
        httpx2.AsyncClient(timeout=20) as http,
        child(tmp_path, "--upstream", mock.url, **environ) as one,
    ):
        for mark in ("x-forwarded-for", "forwarded", "via", "x-real-ip"):
            answer = await http.post(f"{one.url}/v1/messages", json=ask("hello"), headers=CALL | {mark: "198.51.100.1"})
            assert answer.status_code == 401
            assert (await http.get(f"{one.url}/carpool/stats", headers={mark: "198.51.100.1"})).status_code == 401
        assert (await http.post(f"{one.url}/v1/messages", json=ask("hello"), headers=CALL)).status_code == 200
        assert (await http.get(f"{one.url}/carpool/stats")).status_code == 200


async def test_the_names_are_checked_where_some_are_allowed(tmp_path: Path) -> None:
    await with_a_key(tmp_path)
    environ = {"CARPOOL_ADMIN_TOKEN": TOKEN, "CARPOOL_SERVER__ALLOWED_HOSTS": "[carpool.example.com]"}
    async with child(tmp_path, "--host", "0.0.0.0", **environ) as one, httpx2.AsyncClient() as http:
        page = f"{one.url}/carpool/healthz"
        assert (await http.get(page)).status_code == 421
        assert (await http.get(page, headers={"host": "carpool.example.com"})).status_code == 200


async def test_on_this_machine_the_token_holds_when_it_is_set(tmp_path: Path) -> None:
    async with child(tmp_path, CARPOOL_ADMIN_TOKEN=TOKEN) as one, httpx2.AsyncClient() as http:
        assert (await http.get(f"{one.url}/carpool/stats")).status_code == 401
        assert (await http.get(f"{one.url}/carpool/stats", headers={"authorization": f"Bearer {TOKEN}"})).is_success


# ---------------------------------------------------------------- TLS


def fingerprint(context: ssl.SSLContext, url: str) -> bytes | None:
    host, _, port = url.removeprefix("https://").rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as wrapped,
    ):
        return wrapped.getpeercert(binary_form=True)


async def test_it_speaks_tls_and_takes_a_new_certificate_on_a_hangup(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    cert, key = make_certificate(tmp_path)
    new_cert, new_key_file = make_certificate(tmp_path / "new")
    both = ssl.create_default_context(cadata=cert.read_text() + new_cert.read_text())
    async with serve(MockConfig()) as mock, httpx2.AsyncClient(verify=both, timeout=20) as http:
        options = ("--tls-cert", str(cert), "--tls-key", str(key), "--upstream", mock.url)
        async with child(tmp_path, *options) as one:
            assert one.url.startswith("https://127.0.0.1:")
            headers = CALL | {"x-api-key": "k"}
            answer = await http.post(f"{one.url}/v1/messages", json=ask("secretly"), headers=headers)
            assert answer.status_code == 200
            before = await asyncio.to_thread(fingerprint, both, one.url)
            key.write_text("no key at all")  # a half-finished renewal changes nothing
            one.process.send_signal(signal.SIGHUP)
            assert one.process.stderr is not None
            assert b"The certificate stays as it was" in await one.process.stderr.readline()
            assert await asyncio.to_thread(fingerprint, both, one.url) == before
            cert.write_bytes(new_cert.read_bytes())
            key.write_bytes(new_key_file.read_bytes())
            one.process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(10):
                while await asyncio.to_thread(fingerprint, both, one.url) == before:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            answer = await http.post(
                f"{one.url}/v1/messages", json=ask("again"), headers=headers
            )  # as it was connected
            assert answer.status_code == 200


async def test_an_sdk_streams_and_waits_over_tls(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=cert)
    (tmp_path / "carpool.yaml").write_text("batching: {linger_ms: 20, poll_interval_s: 0.05, rpm: 100000}\n")
    options = ("--tls-cert", str(cert), "--tls-key", str(key), "--config", str(tmp_path / "carpool.yaml"))
    async with (
        serve(MockConfig(batch_latency=Constant(1.0))) as mock,
        child(
            tmp_path, *options, "--upstream", mock.url, "--patience", "0.005"
        ) as one,  # 102 every quarter of a second
        httpx2.AsyncClient(verify=trusted) as http,
        AsyncAnthropic(base_url=one.url, api_key="k", max_retries=0, http_client=http) as straight,
        AsyncAnthropic(base_url=f"{one.url}/@budget=30m", api_key="k", max_retries=0, http_client=http) as patient,
    ):
        async with straight.messages.stream(**ask("streamed")) as stream:
            assert (await stream.get_final_message()).content[0].text == expected_text(ask("streamed"))
        assert (await patient.messages.create(**ask("waited"))).content[0].text == expected_text(ask("waited"))
        async with patient.messages.stream(**ask("both")) as stream:
            assert (await stream.get_final_message()).content[0].text == expected_text(ask("both"))


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_old_versions_of_tls_and_plain_http_are_not_spoken(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    assert tls_context(Tls(str(cert), str(key))).minimum_version == ssl.TLSVersion.TLSv1_2
    old = ssl.create_default_context(cafile=cert)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    async with child(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key)) as one, httpx2.AsyncClient() as http:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(fingerprint, old, one.url)
        with pytest.raises(httpx2.HTTPError):
            await http.get(one.url.replace("https:", "http:") + "/carpool/healthz")


def test_certificates_that_can_not_be_used(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, other = make_certificate(tmp_path / "other")
    locked = tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", key, "-out", locked, "-aes256", "-passout", "pass:word"]
    subprocess.run(command, check=True, capture_output=True)
    assert "server.tls.key is missing" in refused(tmp_path, "--tls-cert", str(cert))
    assert "can't be read (No such file" in refused(tmp_path, "--tls-cert", "nowhere.pem", "--tls-key", str(key))
    for wrong in (other, cert, locked):
        assert "no certificate and its key" in refused(tmp_path, "--tls-cert", str(cert), "--tls-key", str(wrong))


# ---------------------------------------------------------------- what its process shows


def test_other_processes_can_not_look_into_it() -> None:
    script = (
        "import ctypes\nfrom carpool.cli.process import no_data_in_crashes\n"
        "with no_data_in_crashes(): print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"  # PR_GET_DUMPABLE
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "0\n"


async def test_it_leaves_no_core_and_says_no_secret_in_its_arguments(tmp_path: Path) -> None:
    async with child(tmp_path, CARPOOL_ADMIN_TOKEN=TOKEN) as one:
        place = Path(f"/proc/{one.process.pid}")
        limits = (place / "limits").read_text()
        assert [line.split()[4:6] for line in limits.splitlines() if line.startswith("Max core file")] == [["0", "0"]]
        assert TOKEN.encode() not in (place / "cmdline").read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        ("--upstream", f"https://me:{UPSTREAM_KEY}@api.anthropic.com"),
        ("--provider", f"openai=https://{UPSTREAM_KEY}@api.openai.com/v1"),
        ("--provider", f"mine=openai:https://me:{UPSTREAM_KEY}@h/v1"),
        ("--store", f"postgresql://me:{UPSTREAM_KEY}@db/carpool"),
        ("--upstream", UPSTREAM_KEY),
        ("--provider", f"openai={UPSTREAM_KEY}"),
    ],
)
def test_no_flag_takes_a_secret(tmp_path: Path, options: tuple[str, str]) -> None:
    said = refused(tmp_path, *options)
    assert UPSTREAM_KEY not in said


async def test_what_should_be_known_is_said_at_the_start(tmp_path: Path) -> None:
    await with_a_key(tmp_path)
    cert, key = make_certificate(tmp_path)
    key.chmod(0o644)
    async with child(tmp_path, "--host", "0.0.0.0", CARPOOL_ADMIN_TOKEN=TOKEN) as one:
        assert one.process.stdout is not None
        assert b"Clients' keys travel to carpool unencrypted" in await one.process.stdout.readuntil(
            b"trusted_proxies.\n"
        )
    async with child(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key)) as one:
        assert one.process.stdout is not None
        assert b"Others on this machine may read the TLS key" in await one.process.stdout.readuntil(b"chmod 600")


# ---------------------------------------------------------------- the way out


async def test_the_way_out_leads_through_the_companys_proxy(tmp_path: Path) -> None:
    """Provider, proxy and carpool are three processes or servers; `HTTPS_PROXY` points at a fourth that nobody asks."""
    cert, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    tunnels: list[bytes] = []

    async def provider(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\nconnection: close\r\n\r\nfrom beyond")
        writer.close()

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tunnels.append(await reader.readuntil(b"\r\n\r\n"))
        host, _, port = tunnels[-1].split()[1].decode().rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        async with asyncio.TaskGroup() as group:
            group.create_task(pump(reader, back))
            group.create_task(pump(there, writer))

    async with (
        await asyncio.start_server(provider, "127.0.0.1", 0, ssl=context) as far,
        await asyncio.start_server(tunnel, "127.0.0.1", 0) as way,
        httpx2.AsyncClient(timeout=20) as http,
    ):
        place, proxy = (f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in (far, way))
        (tmp_path / "carpool.yaml").write_text(
            f"providers: {{anthropic: {{base_url: 'https://{place}', proxy: 'http://{proxy}', ca_file: {cert}}}}}\n"
            "server: {outgoing_proxy_auth_env: PROXY_LOGIN}\n"
        )
        options = ("--config", str(tmp_path / "carpool.yaml"))
        async with child(tmp_path, *options, PROXY_LOGIN="me:word", HTTPS_PROXY="http://127.0.0.1:9") as one:
            answer = await http.get(f"{one.url}/v1/models", headers={"x-api-key": "k"})
            assert (answer.status_code, answer.text) == (200, "from beyond")
        assert [head.split()[1].decode() for head in tunnels] == [place]
        assert b"proxy-authorization: Basic bWU6d29yZA==" in tunnels[0]
    assert "must hold user:password" in refused(tmp_path, *options, PROXY_LOGIN="word")
    cert.write_text("no certificate")
    assert "can't be used" in refused(tmp_path, *options, PROXY_LOGIN="me:word")


async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    except ConnectionError:
        return
    finally:
        sink.close()
