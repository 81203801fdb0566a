"""Wire formats of the provider families: pure translation between bytes and carpool's words."""

from __future__ import annotations

from types import MappingProxyType

from carpool.dialects.anthropic import Anthropic
from carpool.dialects.openai import OpenAI
from carpool.errors import ConfigError
from carpool.ports import Dialect

__all__ = ["ANTHROPIC", "DIALECTS", "OPENAI", "Anthropic", "OpenAI", "get"]

ANTHROPIC: Dialect = Anthropic()
OPENAI: Dialect = OpenAI()
DIALECTS = MappingProxyType({dialect.name: dialect for dialect in (ANTHROPIC, OPENAI)})


def get(name: str) -> Dialect:
    try:
        return DIALECTS[name]
    except KeyError:
        known = ", ".join(sorted(DIALECTS))
        raise ConfigError(f"There is no dialect {name!r}. carpool knows: {known}.") from None
