"""The lines of the log that docs/proxy.md shows are those that carpool writes."""

from __future__ import annotations

import logging
import sys
from datetime import datetime

import pytest

from carpool.cli.console import StoreContents, stopped
from carpool.config import Config
from carpool.engine.events import BatchCollected, BatchEnded, BatchSubmitted, TroubleBegan, TroubleOver
from carpool.frontends.proxy.log import EventLogger, LogEvent, LogLine, Noted, as_text, waiting
from tests.support.doc_blocks import ROOT, blocks

BATCH = "msgbatch_013Zva2CMHLNnXjNJJKqJ2EF"
STORE = "/var/lib/carpool/carpool.db"
MODEL, TICKET = "claude-haiku-4-5", "036p4z1k2m3n5"


def at(clock: str) -> float:
    return datetime.fromisoformat(f"2026-11-18T{clock}").timestamp()


REQUESTS: list[Noted] = [
    LogLine(
        at=at("13:57:55"),
        duration_s=312.0,
        status=200,
        lane="batch",
        model=MODEL,
        input_tokens=1875,
        output_tokens=210,
        cost_usd=0.00146,
        ticket=TICKET,
        provider="anthropic",
        tags={"team": "ci"},
        reason="time enough for a batch",
    ),
    LogLine(
        at=at("14:03:09"),
        status=401,
        request="POST /v1/messages",
        error="carpool does not know this virtual key. Ask its operator for one: carpool keys add.",
    ),
    LogLine(
        at=at("14:03:10"), duration_s=0.21, status=200, lane="pass", request="GET /v1/models", provider="anthropic"
    ),
]
WAITS = LogLine(at=at("14:03:07"), lane="batch", model=MODEL, ticket=TICKET, provider="anthropic", reason="…")
EVENTS = [
    BatchSubmitted(at("14:03:09"), 12, BATCH, 48),
    BatchEnded(at("14:08:19"), 12, BATCH, 310.0),
    BatchCollected(at("14:08:20"), 12, BATCH, {"succeeded": 47, "errored": 1}),
]
ON_NOW = "Its calls go on `now`."
UNREACHED = "No connection to api.anthropic.com could be made."
TROUBLES = [
    TroubleBegan(at("14:03:07"), "", UNREACHED, at("14:03:07"), provider="anthropic"),
    TroubleOver(at("14:06:19"), "", at("14:03:07"), 17, "anthropic"),
    TroubleBegan(at("14:10:02"), "creating a batch", "401: no such key", at("14:10:02"), 1, "anthropic", ON_NOW),
]


def samples() -> list[list[str]]:
    return [block.text.splitlines() for block in blocks(ROOT / "docs" / "proxy.md") if block.language == "text"]


def looks_like(shown: str, written: str) -> bool:
    """`…` in a sample stands for any text."""
    parts = shown.split("…")
    return written.startswith(parts[0]) and written.endswith(parts[-1])


def test_the_samples_are_what_is_written(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["carpool", "serve", "--store", STORE])
    happened: list[LogEvent] = [waiting(WAITS, at("14:33:07"))]
    with caplog.at_level(logging.WARNING):
        for event in (*EVENTS, *TROUBLES):
            EventLogger(happened.append)(event)
    written = [
        [as_text(line).rstrip("\n") for line in REQUESTS],
        [as_text(line).rstrip("\n") for line in happened],
        [f"carpool: {message}" for message in caplog.messages],
        stopped(Config(store=STORE), StoreContents(calls=12, batches=2)),
    ]
    for shown, lines in zip(samples(), written, strict=True):
        assert len(shown) == len(lines)
        wrong = [(sample, line) for sample, line in zip(shown, lines, strict=True) if not looks_like(sample, line)]
        assert not wrong
