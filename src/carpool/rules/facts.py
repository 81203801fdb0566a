"""What a rule can know of a request."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

# Clients that start helpers of their own say so in a header.
SUBAGENT_HEADERS: Final = ("x-claude-code-agent-id", "x-claude-code-parent-agent-id", "x-openai-subagent")
NONE: Final[Mapping[str, str]] = MappingProxyType({})


class Facts(NamedTuple):
    """Texts in lower case, because rules are asked about them again and again and capitals don't matter."""

    dialect: str = ""
    provider: str = ""
    endpoint: str = ""
    model: str = ""
    user_agent: str = ""
    headers: Mapping[str, str] = NONE  # names in lower case, values as they came
    tags: Mapping[str, str] = NONE
    streaming: bool = False
    tool_turn: bool = False  # the last message carries the results of tools: an agent is at work
    subagent: bool = False
    has_budget: bool = False  # the client gave one
    size: int = 0  # bytes of the body

    def __repr__(self) -> str:  # never the headers: keys are among them
        return f"<Facts of a call of {self.model or 'some model'} to {self.provider or 'some provider'}>"


def is_subagent(headers: Mapping[str, str]) -> bool:
    return not headers.keys().isdisjoint(SUBAGENT_HEADERS)
