"""The ports to the world, with their contracts in prose: Clock, Wire, Store, Dialect.

Whoever implements one of these obeys the prose; `tests/contract` proves it for every implementation.
"""

from carpool.ports.clock import Clock
from carpool.ports.dialect import (
    Allowance,
    Allowances,
    Ask,
    BatchReport,
    Dialect,
    Limits,
    News,
    Parsed,
    RawRequest,
    Refusal,
    ResultLine,
    UsageTap,
)
from carpool.ports.store import Store
from carpool.ports.wire import PouringWire, StreamedBody, Taker, Tether, Wire, WireRequest, WireResponse

__all__ = [
    "Allowance",
    "Allowances",
    "Ask",
    "BatchReport",
    "Clock",
    "Dialect",
    "Limits",
    "News",
    "Parsed",
    "PouringWire",
    "RawRequest",
    "Refusal",
    "ResultLine",
    "Store",
    "StreamedBody",
    "Taker",
    "Tether",
    "UsageTap",
    "Wire",
    "WireRequest",
    "WireResponse",
]
