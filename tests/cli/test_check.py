"""`carpool serve --check`: what holds, and what would become of a request."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carpool import cli

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
SECRET = "sk-ant-api03-very-secret"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def running(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["carpool", "serve", "--check", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "120")
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
    assert "The config is sound." in out
    assert "https://api.openai.com/v1" in out


@pytest.mark.parametrize("example", [pytest.param(example, id=example.name) for example in EXAMPLES])
def test_the_examples_are_sound(run: Run, example: Path) -> None:
    code, out, err = run("--config", example, ROOT / "examples" / "subagent.json")
    assert (code, err) == (0, "")
    assert "The config is sound." in out


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


def test_it_shows_where_each_setting_came_from(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARPOOL_BATCHING__LINGER_MS", "20")
    config = "routing: {min_batch_size: 3}\nproviders: {anthropic: {}}"
    settings = told(config, None, "--store", "x.db")["settings"]
    assert settings["batching.min_batch_size"] == {"value": "3", "from": "carpool.yaml"}
    assert settings["batching.linger_ms"] == {"value": "20", "from": "CARPOOL_BATCHING__LINGER_MS"}
    assert settings["store.url"] == {"value": "x.db", "from": "--store"}
    assert settings["batching.rpm"] == {"value": "not set", "from": "default"}
    assert "providers.openai.base_url" not in settings


@pytest.mark.parametrize("value", [None, SECRET])
def test_of_a_key_only_the_variable_is_shown(run: Run, told: Any, monkeypatch: Any, value: str | None) -> None:
    config = "providers: {anthropic: {api_key_env: MY_KEY}}"
    monkeypatch.delenv("MY_KEY", raising=False)
    if value:
        monkeypatch.setenv("MY_KEY", value)
    document = told(config)
    shown = document["settings"]["providers.anthropic.api_key_env"]["value"]
    assert shown == f"MY_KEY, which is {'set' if value else 'not set'}"
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
    assert found["provider"] == "anthropic at https://api.anthropic.com"
    assert (found["rule"], found["budget"], found["lane"], found["tags"]) == (
        "subagents",
        "30 min",
        "batch",
        "kind=sub",
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
        (BODY, "anthropic", "now", "none"),  # a bare body
        ({**BODY, "model": "claude-opus-4-5"}, "anthropic", "batch", "rest"),
        ({"path": "/@budget=1h/v1/messages", "body": BODY}, "anthropic", "batch", "none"),
        ({"path": "/v1/messages", "headers": {"x-carpool-budget": "1h"}, "body": BODY}, "anthropic", "batch", "none"),
        ({"model": "gpt-5", "messages": []}, "openai", "now", "none"),
        ({"model": "gpt-5", "input": "hi"}, "openai", "now", "none"),
        (
            {"path": "/@provider=openai/v1/chat/completions", "body": {"model": "o", "messages": []}},
            "openai",
            "now",
            "none",
        ),
        ({"method": "GET", "path": "/v1/models", "headers": {"anthropic-version": "x"}}, "anthropic", "now", "none"),
    ],
)
def test_provider_lane_and_rule(told: Any, request_: Any, provider: str, lane: str, rule: str) -> None:
    found = told(RULES, request_)["request"]
    assert found["provider"].startswith(f"{provider} at ")
    assert (found["lane"], found["rule"]) == (lane, rule)


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
        ({"path": "/v1/messages", "bdoy": {}}, "has 'bdoy', which is none of body, headers, method, path."),
        ({"path": "/@soon/v1/messages", "body": BODY}, "would be refused: 'soon' in the path is not an option"),
        ({"headers": {"x-carpool-budget": "soon"}, "body": BODY}, "would be refused: 'soon' is not a budget"),
        ({"headers": [1], "body": BODY}, "Its headers must be names with values."),
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
    assert (settings["providers.openai.default"], settings["providers.local.default"]) == ("true", "false")


def test_a_request_goes_with_check_only(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["carpool", "serve", "request.json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "go with --check" in capsys.readouterr().err


# ---------------------------------------------------------------- where others can reach it


def test_a_host_that_others_reach_needs_a_token(run: Run, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARPOOL_ADMIN_TOKEN", raising=False)
    code, _, err = run("--host", "0.0.0.0")
    assert (code, "Put an admin token into CARPOOL_ADMIN_TOKEN" in err) == (2, True)
    assert (
        "Put an admin token into MY_TOKEN" in told("server: {admin_token_env: MY_TOKEN}", None, "--host", "::")["error"]
    )
    monkeypatch.setenv("CARPOOL_ADMIN_TOKEN", SECRET)
    code, out, err = run("--host", "0.0.0.0")
    assert (code, err) == (0, "")
    assert SECRET not in out
    assert "CARPOOL_ADMIN_TOKEN, which is set" in out


def test_files_that_are_named_and_not_here_are_noted(told: Any, tmp_path: Path) -> None:
    (tmp_path / "roots.pem").touch()
    config = f"server: {{tls: {{cert: /nowhere/c.pem, key: /nowhere/k.pem}}, ca_file: {tmp_path}/roots.pem}}"
    notes = told(config)["notes"]
    assert notes == [
        "server.tls.cert names /nowhere/c.pem, which is not on this machine.",
        "server.tls.key names /nowhere/k.pem, which is not on this machine.",
    ]


def test_flags_for_tls_are_settings_too(told: Any) -> None:
    settings = told("", None, "--tls-cert", "a.pem", "--tls-key", "b.pem")["settings"]
    assert settings["server.tls.cert"] == {"value": "a.pem", "from": "--tls-cert"}
    assert settings["server.tls.key"] == {"value": "b.pem", "from": "--tls-key"}
