"""Recognises the kind of client by its headers: how it can be kept waiting, and its name in the log."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

from carpool.core.model import Headers

# Measured to accept any number of 1xx responses. Others accept only a few, or mistake the first for the response.
PATIENT_WITH_1XX = frozenset({"python", "js"})
# SDKs that by default time out after five seconds of silence, and accept any number of 1xx responses. Their headers do
# not say which timeout is configured.
HASTY = ("mistral-client-python/", "speakeasy-sdk/python")  # mistralai
HASTY_S = 5.0
# How many seconds a client waits for the next bytes; some send a word such as NOT_GIVEN.
LIMITS = ("x-stainless-read-timeout", "x-stainless-timeout")
_RELEVANT = frozenset({"user-agent", "x-stainless-lang", "x-claude-code-session-id", "originator", "prefer", *LIMITS})


class ClientKind(StrEnum):
    CLAUDE_CODE = "claude-code"
    CODEX = "codex"
    SDK = "sdk"
    OTHER = "other"


class Client(NamedTuple):
    """What the headers tell about a client. `name` is for the log: a product name, without version or comment."""

    kind: ClientKind
    name: str
    bears_1xx: bool
    prefer: str = ""
    limit: float = math.inf  # seconds of silence after which it times out, if known


def recognise(headers: Headers) -> Client:
    relevant = {name: value for name, value in headers if name in _RELEVANT}
    agent = relevant.get("user-agent", "")
    language = relevant.get("x-stainless-lang", "").lower()
    kind = _kind(agent, relevant, language)
    hasty = agent.startswith(HASTY)
    limit = min([HASTY_S if hasty else math.inf, *(_seconds(relevant.get(name, "")) for name in LIMITS)])
    return Client(kind, _product(agent), hasty or language in PATIENT_WITH_1XX, relevant.get("prefer", ""), limit)


def _seconds(text: str) -> float:
    """The seconds, or infinity if the text is not a positive number."""
    try:
        seconds = float(text)
    except ValueError:
        return math.inf
    return seconds if seconds > 0 else math.inf  # NaN is not


def _kind(agent: str, relevant: dict[str, str], language: str) -> ClientKind:
    if agent.startswith("claude-cli/") or "x-claude-code-session-id" in relevant:
        return ClientKind.CLAUDE_CODE
    if agent.startswith("codex") or relevant.get("originator", "").startswith("codex"):
        return ClientKind.CODEX
    return ClientKind.SDK if language else ClientKind.OTHER


def _product(agent: str) -> str:
    """The first word of a user agent without its version: `AsyncAnthropic/Python 2.8` is `AsyncAnthropic`."""
    word = agent.partition("/")[0].partition(" ")[0][:40]
    return word if word.isascii() and word.isprintable() else ""
