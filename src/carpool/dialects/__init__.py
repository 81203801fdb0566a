"""Wire formats of the provider families: pure translation between bytes and carpool's words."""

from __future__ import annotations

from types import MappingProxyType

from carpool.dialects.anthropic import Anthropic
from carpool.errors import ConfigError
from carpool.ports import Dialect

__all__ = ["ANTHROPIC", "DIALECTS", "Anthropic", "get"]

ANTHROPIC: Dialect = Anthropic()
DIALECTS = MappingProxyType({dialect.name: dialect for dialect in (ANTHROPIC,)})


def get(name: str) -> Dialect:
    try:
        return DIALECTS[name]
    except KeyError:
        known = ", ".join(sorted(DIALECTS))
        raise ConfigError(f"There is no dialect {name!r}. carpool knows: {known}.") from None
