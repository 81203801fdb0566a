"""`carpool serve --check`: what holds, and what would become of a request."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carpool import cli
from tests.support import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
SECRET = "sk-ant-api03-very-secret"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def running(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["carpool", "serve", "--check", "--port", "0", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return running


@pytest.fixture
def told(run: Run, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What `--json` says of a config and a request."""

    def telling(config: str, request: Any = None, *arguments: str) -> dict[str, Any]:
        (tmp_path / "carpool.yaml").write_text(config)
        (tmp_path / "request.json").write_text(json.dumps(request))
        files = [] if request is None else [tmp_path / "request.json"]
        code, out, _ = run("--json", "--config", tmp_path / "carpool.yaml", *arguments, *files)
        document = json.loads(out)
        assert code == (0 if document["ok"] else 2)
        return dict(document)

    return telling


BODY = {"model": "claude-haiku-4-5", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}


def test_without_a_config_the_defaults_are_sound(run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out == (
        "All settings have their defaults: --all shows them.\n"
        "The config is sound, and carpool can start with it here.\n"
    )


@pytest.mark.parametrize("example", [pytest.param(example, id=example.name) for example in EXAMPLES])
def test_the_examples_are_sound(run: Run, example: Path) -> None:
    """But for files that are on the machine of the example only."""
    _, out, _ = run("--json", "--config", example, "--store", "x.db", ROOT / "examples" / "subagent.json")
    found = json.loads(out)
    assert all("can't be read (No such file or directory)" in error for error in found.get("errors", ()))
    assert found["request"]["lane"] in ("now", "batch")


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


def test_it_shows_where_each_setting_came_from(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARPOOL_BATCHING__LINGER_MS", "20")
    config = "routing: {min_batch_size: 3}\nproviders: {anthropic: {}}"
    settings = told(config, None, "--store", "x.db")["settings"]
    assert settings["batching.min_batch_size"] == {"value": 3, "from": "carpool.yaml"}
    assert settings["batching.linger_ms"] == {"value": 20, "from": "CARPOOL_BATCHING__LINGER_MS"}
    assert settings["store.url"] == {"value": "x.db", "from": "--store"}
    assert settings["batching.rpm"] == {"value": None, "from": "default"}
    assert "providers.openai.base_url" not in settings


@pytest.mark.parametrize("value", [None, SECRET])
def test_of_a_key_only_the_variable_is_shown(run: Run, told: Any, monkeypatch: Any, value: str | None) -> None:
    config = "providers: {anthropic: {api_key_env: MY_KEY}}"
    monkeypatch.delenv("MY_KEY", raising=False)
    if value:
        monkeypatch.setenv("MY_KEY", value)
    document = told(config)
    shown = document["settings"]["providers.anthropic.api_key_env"]
    assert shown == {"value": "MY_KEY", "from": "carpool.yaml", "is_set": value is not None}
    assert f"MY_KEY, which is {'set' if value else 'not set'}" in run("--config", "carpool.yaml")[1]
    assert len(document["notes"]) == (0 if value else 1)
    assert SECRET not in json.dumps(document)


def test_what_is_wrong_is_said_and_ends_with_2(run: Run, told: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("routing: {rules: [{match: {modle: x}, lane: now}]}")
    code, out, err = run("--config", tmp_path / "bad.yaml")
    assert (code, out) == (2, "")
    assert "routing.rules[0].match.modle is not a setting" in err
    document = told("batching: {rpm: 0}")
    assert document["error"].endswith("batching.rpm is 0; it must be a whole number from 1 to 1000000.")


RULES = """
routing:
  rules:
    - {name: people, match: {header.x-interactive: true}, refuse_budget: a person waits}
    - {name: subagents, match: {subagent: true}, budget: 30m, tags: {kind: sub}}
    - {name: rest, match: {model: "*opus*"}, lane: batch}
"""


def test_it_explains_a_request(told: Any) -> None:
    request = {"path": "/v1/messages", "headers": {"X-Claude-Code-Agent-Id": "a"}, "body": BODY}
    found = told(RULES, request)["request"]
    assert (found["provider"], found["base_url"]) == ("anthropic", "https://api.anthropic.com")
    assert (found["rule"], found["budget"], found["lane"], found["tags"]) == (
        "subagents",
        1800,
        "batch",
        {"kind": "sub"},
    )
    assert found["reason"].startswith("The rule subagents gives a budget.")
    assert [(one["name"], one["matched"]) for one in found["rules"]] == [
        ("people", False),
        ("subagents", True),
        ("rest", None),
    ]


def test_in_words_too(run: Run, tmp_path: Path) -> None:
    (tmp_path / "carpool.yaml").write_text(RULES)
    (tmp_path / "request.json").write_text(json.dumps({"body": BODY, "headers": {"x-interactive": "1"}}))
    code, out, _ = run("--config", tmp_path / "carpool.yaml", tmp_path / "request.json")
    assert code == 0
    assert "1. people: matches, since header.x-interactive is there." in out
    assert "2. subagents: not asked, since a rule before it matched." in out


@pytest.mark.parametrize(
    ("request_", "provider", "lane", "rule"),
    [
        (BODY, "anthropic", "now", None),  # a bare body
        ({**BODY, "model": "claude-opus-4-5"}, "anthropic", "batch", "rest"),
        ({"path": "/@budget=1h/v1/messages", "body": BODY}, "anthropic", "batch", None),
        ({"path": "/v1/messages", "headers": {"x-carpool-budget": "1h"}, "body": BODY}, "anthropic", "batch", None),
        ({"model": "gpt-5", "messages": []}, "openai", "now", None),
        ({"model": "gpt-5", "input": "hi"}, "openai", "now", None),
        (
            {"path": "/@provider=openai/v1/chat/completions", "body": {"model": "o", "messages": []}},
            "openai",
            "now",
            None,
        ),
        ({"method": "GET", "path": "/v1/models", "headers": {"anthropic-version": "x"}}, "anthropic", "now", None),
    ],
)
def test_provider_lane_and_rule(told: Any, request_: Any, provider: str, lane: str, rule: str | None) -> None:
    found = told(RULES, request_)["request"]
    assert (found["provider"], found["lane"], found["rule"]) == (provider, lane, rule)


ASKED = {"model": "gpt-6-luna", "max_completion_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/@budget=5m/v1/chat/completions"


@pytest.mark.parametrize(
    ("request_", "lane", "batch", "flex"),
    [
        ({"path": CHAT, "body": ASKED}, "flex", "may take", "may take"),
        ({"path": CHAT, "body": {**ASKED, "model": "gpt-5.2"}}, "flex", "may take", "may take"),
        (
            {"path": CHAT, "body": {**ASKED, "model": "gpt-4o-mini"}},
            "batch",
            "may take",
            "not offered on the lane flex",
        ),
        (
            {"path": CHAT, "body": {**ASKED, "model": "gpt-5.3-codex"}},
            "now",
            "not offered on the lane batch",
            "not off",
        ),
        ({"path": CHAT, "body": {**ASKED, "service_tier": "priority"}}, "now", "service tier", "service tier"),
        ({"path": CHAT, "body": {**ASKED, "store": True}}, "flex", "may not carry `store`", "may take"),
        (
            {"path": "/v1/embeddings", "body": {"model": "text-embedding-3-small", "input": "x"}},
            "now",
            "may",
            "endpoint",
        ),
    ],
)
def test_what_a_model_can_do_is_said(told: Any, request_: Any, lane: str, batch: str, flex: str) -> None:
    found = told("", request_)["request"]
    assert found["lane"] == lane, found["reason"]
    assert batch in found["batch"]
    assert flex in found["flex"]


def test_what_the_config_says_of_a_model_holds(told: Any) -> None:
    config = (
        "providers: {openai: {dialect: openai, base_url: 'http://127.0.0.1:1/v1', models: {gpt-6-luna: {flex: false}}}}"
    )
    found = told(config, {"path": CHAT, "body": ASKED})["request"]
    assert found["flex"] == "The model gpt-6-luna is not offered on the lane flex."
    assert found["lane"] == "batch"


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ([], "must be a JSON object"),
        (
            {"path": "/v1/messages", "bdoy": {}},
            "unknown field `bdoy`. It must be a JSON object: the body of a call, or method, path, headers and body.",
        ),
        (
            {"path": "/@soon/v1/messages", "body": BODY},
            "would be refused with status 400: 'soon' in the path is not an option",
        ),
        (
            {"headers": {"x-carpool-budget": "soon"}, "body": BODY},
            "would be refused with status 400: 'soon' is not a budget",
        ),
        ({"headers": [1], "body": BODY}, "Expected `object | null`, got `array` - at `$.headers`"),
        ({"path": "/v1/messages", "body": {"model": 5}}, "would be refused with status 400: "),
        ({"path": "/somewhere", "body": {}}, "would be refused with status 404: "),
        ({"path": "/@provider=nobody/v1/messages", "body": BODY}, "There is no provider 'nobody' here."),
    ],
)
def test_a_request_that_would_be_refused(told: Any, request_: Any, said: str) -> None:
    assert said in told(RULES, request_)["error"]


def test_a_request_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    assert "can't be read" in run(tmp_path / "nowhere.json")[2]
    (tmp_path / "broken.json").write_text("{")
    assert "can't be read" in run(tmp_path / "broken.json")[2]


@pytest.mark.parametrize(
    ("provider", "said"),
    [
        ("nonsense", "--provider takes a name and a base URL"),
        ("=http://x", "--provider takes a name and a base URL"),
        ("new=http://127.0.0.1:1/v1", "providers.new.dialect is missing"),
        ("openai=nowhere", "--provider openai is 'nowhere', which is not a provider's base URL"),
    ],
)
def test_a_bad_provider_flag(run: Run, provider: str, said: str) -> None:
    code, _, err = run("--provider", provider)
    assert code == 2
    assert said in err


def test_providers_from_flags(run: Run) -> None:
    arguments = ("--provider", "openai=http://127.0.0.1:1/v1", "--provider", "local=openai:http://127.0.0.1:2/v1")
    code, out, _ = run("--json", *arguments, "--upstream", "http://127.0.0.1:3")
    settings = {path: one["value"] for path, one in json.loads(out)["settings"].items()}
    assert code == 0
    assert settings["providers.openai.base_url"] == "http://127.0.0.1:1/v1"
    assert settings["providers.local.base_url"] == "http://127.0.0.1:2/v1"
    assert settings["providers.anthropic.base_url"] == "http://127.0.0.1:3"
    assert (settings["providers.openai.default"], settings["providers.local.default"]) == (True, False)


def test_a_request_goes_with_check_only(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["carpool", "serve", "request.json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "go with --check" in capsys.readouterr().err


# ---------------------------------------------------------------- where others can reach it


def test_a_host_that_others_reach_needs_a_token(run: Run, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARPOOL_ADMIN_TOKEN", raising=False)
    keys = [sys.executable, "-m", "carpool", "keys", "add", "ci"]
    subprocess.run(keys, check=True, capture_output=True)
    code, _, err = run("--host", "0.0.0.0")
    assert (code, "Put an admin token into CARPOOL_ADMIN_TOKEN" in err) == (2, True)
    assert (
        "Put an admin token into MY_TOKEN" in told("server: {admin_token_env: MY_TOKEN}", None, "--host", "::")["error"]
    )
    monkeypatch.setenv("CARPOOL_ADMIN_TOKEN", SECRET)
    code, out, err = run("--host", "0.0.0.0", "--all")
    assert (code, err) == (0, "")
    assert SECRET not in out
    assert "CARPOOL_ADMIN_TOKEN, which is set" in out


def test_flags_for_tls_are_settings_too(run: Run) -> None:
    settings = json.loads(run("--json", "--tls-cert", "a.pem", "--tls-key", "b.pem")[1])["settings"]
    assert settings["server.tls.cert"] == {"value": "a.pem", "from": "--tls-cert"}
    assert settings["server.tls.key"] == {"value": "b.pem", "from": "--tls-key"}


# ---------------------------------------------------------------- what is shown, and how

MUCH = """
providers:
  anthropic:
    base_url: "https://a-host-with-a-rather-long-name.and.a.long.domain.example.com/a/long/path"
    proxy: direct
  groq: {window: 48h, models: {"my-*": {batch: false}}}
server: {allowed_hosts: [a.example.com, b.example.com], outgoing_proxy: "http://proxy.example.com:3128"}
routing:
  default_budget: 90s
  rules:
    - {name: subagents, match: {subagent: true, model: "*haiku*"}, budget: 30m, tags: {kind: sub}}
    - {name: people, refuse_budget: a person waits}
limits: {max_body_mb: 1.5, max_waiting_calls_per_credential: 10}
store: {encrypt: true}
"""


def test_json_has_true_types(told: Any) -> None:
    found = told(MUCH)
    values = {path: one["value"] for path, one in found["settings"].items()}
    wanted = {
        "providers.groq.window": 172_800,
        "providers.groq.models": {"my-*": {"batch": False}},
        "providers.groq.default": True,
        "providers.groq.api_key_env": None,
        "server.allowed_hosts": ["a.example.com", "b.example.com"],
        "server.trusted_proxies": [],
        "routing.default_budget": 90,
        "routing.rules": ["subagents", "people"],
        "routing.max_attempts": 3,
        "limits.max_body_mb": 1.5,
        "batching.rpm": None,
        "store.encrypt": True,
        "keys.required": None,
    }
    assert {path: values[path] for path in wanted} == wanted
    assert [type(values[path]) for path in wanted] == [
        type(one) if not isinstance(one, int) or isinstance(one, bool) else type(values[path])
        for path, one in wanted.items()
    ]
    first, second = found["rules"]
    assert (first["match"], first["budget"], first["tags"]) == (
        {"subagent": True, "model": "*haiku*"},
        1800,
        {"kind": "sub"},
    )
    assert (second["match"], second["refuse_budget"], second["budget"]) == ({}, "a person waits", None)


def test_what_a_provider_has_from_the_server_section_says_so(told: Any) -> None:
    settings = told(MUCH)["settings"]
    assert settings["providers.groq.proxy"] == {"value": "http://proxy.example.com:3128", "from": "carpool.yaml"}
    assert settings["providers.anthropic.proxy"] == {"value": None, "from": "carpool.yaml"}
    assert settings["providers.groq.ca_file"]["from"] == "default"


def test_what_was_set_comes_first_and_the_rest_with_all(run: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("batching: {rpm: 7}\nlimits: {max_headers: 256}")
    short = run("--config", "c.yaml")[1]
    assert [line.split() for line in short.splitlines()[3:5]] == [
        ["batching.rpm", "7", "c.yaml"],
        ["limits.max_headers", "256", "c.yaml"],
    ]
    assert "store.url" not in short
    whole = run("--config", "c.yaml", "--all")[1].splitlines()
    assert whole[3].split() == ["batching.rpm", "7", "c.yaml"]
    settings = json.loads(run("--config", "c.yaml", "--json")[1])["settings"]
    assert {line.split()[0] for line in whole if ("default" in line or "c.yaml" in line)} == set(settings)


@pytest.mark.parametrize("columns", ["40", "80", None])
def test_nothing_is_cut_or_wrapped_in_a_pipe(tmp_path: Path, columns: str | None) -> None:
    (tmp_path / "carpool.yaml").write_text(MUCH)
    (tmp_path / "request.json").write_text(json.dumps({"path": "/@budget=1h/v1/messages", "body": BODY}))
    command = [sys.executable, "-m", "carpool", "serve", "--check", "--port", "0", "--all", "--config", "carpool.yaml"]
    environment = {"PATH": os.environ["PATH"]} | ({"COLUMNS": columns} if columns else {})
    ran = subprocess.run(
        [*command, "request.json"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    lines = {" ".join(line.split()) for line in ran.stdout.splitlines()}
    url = "https://a-host-with-a-rather-long-name.and.a.long.domain.example.com/a/long/path"
    assert f"providers.anthropic.base_url {url} carpool.yaml" in lines
    assert "limits.max_waiting_calls_per_credential 10 carpool.yaml" in lines
    assert "subagents subagent true; model *haiku* budget 30 min; tags kind=sub" in lines
    assert f"provider anthropic at {url}" in lines
    assert "…" not in ran.stdout


@pytest.mark.parametrize("columns", [80, 120])
def test_at_a_terminal_it_fits_and_names_stay_whole(tmp_path: Path, columns: int) -> None:
    (tmp_path / "carpool.yaml").write_text(MUCH)
    said = at_a_terminal(tmp_path, columns, "serve", "--check", "--port", "0", "--all", "--config", "carpool.yaml")
    lines = said.splitlines()
    assert max(map(len, lines)) <= columns
    names = {line.split()[0] for line in lines if line.strip()}
    assert {"limits.max_waiting_calls_per_credential", "observability.alert_on_batch_failure_rate"} <= names
    assert "…" not in said


def at_a_terminal(folder: Path, columns: int, *arguments: str) -> str:
    """What the command writes to a terminal of that width, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "carpool", *arguments]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=theirs, stdin=theirs) as process:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # what a terminal says when its last writer is gone
            while piece := os.read(ours, 65_536):
                said += piece
    os.close(ours)
    assert process.returncode == 0
    return said.decode().replace("\r\n", "\n")
