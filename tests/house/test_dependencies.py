"""The dependencies: each has its reason in the docs, and uvicorn, whose private classes we extend, is capped."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from importlib.metadata import version

import pytest
from uvicorn.protocols.http import flow_control, httptools_impl

from .sources import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NAME = re.compile(r"[A-Za-z0-9-]+")

# What frontends/proxy/http and mock/core/server.py use of uvicorn that it does not document.
PRIVATE = {
    httptools_impl.HttpToolsProtocol: (
        "_start_asgi_task _unset_keepalive_if_required app client connection_lost connection_made connections cycle "
        "data_received eof_received flow headers loop on_body on_header on_headers_complete on_message_begin "
        "on_message_complete on_response_complete on_url parser pause_writing pipeline resume_writing scope "
        "server_state shutdown tasks timeout_keep_alive timeout_keep_alive_handler timeout_keep_alive_task transport "
        "url"
    ),
    httptools_impl.RequestResponseCycle: (
        "body chunked_encoding disconnected expected_content_length flow keep_alive message_event more_body "
        "response_complete response_started run_asgi scope send transport waiting_for_100_continue"
    ),
    flow_control.FlowControl: "pause_reading read_paused resume_reading write_paused",
}


def admitted() -> tuple[int, int]:
    """The oldest minor version of uvicorn that is admitted, and the first that is not."""
    (bounds,) = (row for row in PROJECT["dependencies"] if row.startswith("uvicorn"))
    found = re.fullmatch(r"uvicorn>=0\.(\d+),<0\.(\d+)", bounds)
    assert found, f"{bounds} has no upper bound."
    return int(found[1]), int(found[2])


def test_the_newest_uvicorn_that_is_admitted_is_the_one_that_is_tested() -> None:
    installed = int(version("uvicorn").split(".")[1])
    assert installed == admitted()[1] - 1, "Test the newer uvicorn, then raise the cap; or run `make setup` again."


def test_the_oldest_uvicorn_that_is_admitted_is_tested_too() -> None:
    assert f"UVICORN := 0.{admitted()[0]}\n" in (ROOT / "Makefile").read_text("utf-8")


@pytest.mark.parametrize("kind", PRIVATE)
def test_private_names_of_uvicorn_exist(kind: type) -> None:
    fields = {node.attr for node in ast.walk(ast.parse(inspect.getsource(kind))) if isinstance(node, ast.Attribute)}
    missing = set(PRIVATE[kind].split()) - fields - set(dir(kind))
    assert not missing, f"uvicorn {version('uvicorn')} has no {kind.__name__}.{min(missing)}."


def test_every_dependency_has_its_reason_in_the_docs() -> None:
    extras = PROJECT["optional-dependencies"]
    listed = [*PROJECT["dependencies"], *(row for extra, rows in extras.items() for row in rows if extra != "dev")]
    names = {match[0] for row in listed if (match := NAME.match(row))}
    docs = (ROOT / "docs/architecture.md").read_text("utf-8")
    section = docs.partition("\n## Dependencies\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(.+?)`", row)} == names
