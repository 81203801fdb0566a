"""A stand-in for the Anthropic API over real HTTP: its limits, its timing, its faults, and a bill of its own.

It shares no code with the rest of carpool, so that each can be checked against the other.
"""

from carpool.mock.batch import Batch, Outcome
from carpool.mock.bill import Bill, Charge, Usage, price_nano
from carpool.mock.config import MockConfig
from carpool.mock.digest import expected_text, fingerprint
from carpool.mock.errors import ApiError, ConnectionCut
from carpool.mock.faults import Faults
from carpool.mock.latency import Constant, Latency, LogNormal, Mixture, Uniform, parse_latency
from carpool.mock.models import CATALOGUE, ModelSpec, find_model
from carpool.mock.provider import MockAnthropic
from carpool.mock.server import MockServer, run, serve, serve_in_thread

__all__ = [
    "CATALOGUE",
    "ApiError",
    "Batch",
    "Bill",
    "Charge",
    "ConnectionCut",
    "Constant",
    "Faults",
    "Latency",
    "LogNormal",
    "Mixture",
    "MockAnthropic",
    "MockConfig",
    "MockServer",
    "ModelSpec",
    "Outcome",
    "Uniform",
    "Usage",
    "expected_text",
    "find_model",
    "fingerprint",
    "parse_latency",
    "price_nano",
    "run",
    "serve",
    "serve_in_thread",
]
