"""Which kind of client is asking: how it may be kept waiting, and what it is called in the log."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from carpool.model import Headers

# Measured to wait through any number of 1xx answers. Others bear only a few, or take the first for the answer.
PATIENT_WITH_1XX = frozenset({"python", "js"})
# SDKs that give up after five seconds of silence unless they are told otherwise, and bear any number of 1xx answers.
HASTY = ("mistral-client-python/", "speakeasy-sdk/python")  # mistralai
_TELLING = frozenset({"user-agent", "x-stainless-lang", "x-claude-code-session-id", "originator", "prefer"})


class Kind(StrEnum):
    CLAUDE_CODE = "claude-code"
    CODEX = "codex"
    SDK = "sdk"
    OTHER = "other"


class Client(NamedTuple):
    """What its headers say of a client. `name` is for the log: a product's name, never a version or a comment."""

    kind: Kind
    name: str
    bears_1xx: bool
    prefer: str = ""
    hasty: bool = False  # it bears a few seconds of silence only


def recognise(headers: Headers) -> Client:
    told = {name: value for name, value in headers if name in _TELLING}
    agent = told.get("user-agent", "")
    language = told.get("x-stainless-lang", "").lower()
    kind = _kind(agent, told, language)
    hasty = agent.startswith(HASTY)
    return Client(kind, _product(agent), hasty or language in PATIENT_WITH_1XX, told.get("prefer", ""), hasty)


def _kind(agent: str, told: dict[str, str], language: str) -> Kind:
    if agent.startswith("claude-cli/") or "x-claude-code-session-id" in told:
        return Kind.CLAUDE_CODE
    if agent.startswith("codex") or told.get("originator", "").startswith("codex"):
        return Kind.CODEX
    return Kind.SDK if language else Kind.OTHER


def _product(agent: str) -> str:
    """The first word of a user agent without its version: `AsyncAnthropic/Python 2.8` is `AsyncAnthropic`."""
    word = agent.partition("/")[0].partition(" ")[0][:40]
    return word if word.isascii() and word.isprintable() else ""
