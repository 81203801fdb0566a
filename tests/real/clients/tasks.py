"""What the scripts for the frameworks share. A framework is given tasks, one call of its own each (with a tool: two).

`text` and `stream` are a plain answer, whole and in parts; `object` is an answer in the form of a model, `parts` the
same as it comes in; `tool` lets the framework call a tool and answer with what that found.
"""

from __future__ import annotations

from typing import Any

from asking import FOUND, Ask, Told
from pydantic import BaseModel


class Stop(BaseModel):
    name: str
    nights: int


class Trip(BaseModel):
    """A journey."""

    city: str
    days: int
    stops: list[Stop]
    note: str | None


class Tools:
    """The tool of one task, and what it was called with."""

    def __init__(self) -> None:
        self.called: list[Any] = []

    def lookup(self, query: str) -> str:
        """Looks something up.

        Args:
            query: What to look up.
        """
        self.called.append({"query": query})
        return FOUND


LOOKUP_SCHEMA = {
    "type": "object",
    "properties": {"query": {"type": "string"}},
    "required": ["query"],
    "additionalProperties": False,
}


def told(text: str = "", made: BaseModel | None = None, called: list[Any] | None = None) -> list[Told]:
    return [{"text": text, "object": None if made is None else made.model_dump(), "called": called or []}]


def failure(error: Exception) -> Told:
    return {"said": str(error)[:600]}


def options(ask: Ask) -> dict[str, Any]:
    return {"base_url": ask["url"], "api_key": ask["key"]}
