"""A mock of the Anthropic API over real HTTP: its limits, latencies and faults, with an independent bill.
The same port serves OpenAI's API, with files, batches, flex and webhooks.

It shares no code with the rest of carpool, so that each can be checked against the other.
"""

from carpool.mock.anthropic.digest import expected_text, fingerprint
from carpool.mock.anthropic.models import CATALOGUE, ModelSpec, find_model
from carpool.mock.core.batch import Batch, Outcome
from carpool.mock.core.bill import Bill, Charge, Usage, price_nano
from carpool.mock.core.config import MockConfig
from carpool.mock.core.errors import ApiError, ConnectionCut
from carpool.mock.core.fault_list import FAULTS, LENGTHS
from carpool.mock.core.faults import Faults
from carpool.mock.core.latency import Constant, Latency, LogNormal, Mixture, RequestLatencies, Uniform, parse_latency
from carpool.mock.core.provider import MockAnthropic
from carpool.mock.core.server import MockServer, run, serve, serve_in_thread
from carpool.mock.openai.batch import OpenAIBatch
from carpool.mock.openai.config import OpenAIConfig
from carpool.mock.openai.digest import expected_openai_text, openai_fingerprint
from carpool.mock.openai.models import CATALOGUE as OPENAI_CATALOGUE
from carpool.mock.openai.models import OpenAISpec
from carpool.mock.openai.providers import TABLE as VENDORS

__all__ = [
    "CATALOGUE",
    "FAULTS",
    "LENGTHS",
    "OPENAI_CATALOGUE",
    "VENDORS",
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
    "OpenAIBatch",
    "OpenAIConfig",
    "OpenAISpec",
    "Outcome",
    "RequestLatencies",
    "Uniform",
    "Usage",
    "expected_openai_text",
    "expected_text",
    "find_model",
    "fingerprint",
    "openai_fingerprint",
    "parse_latency",
    "price_nano",
    "run",
    "serve",
    "serve_in_thread",
]
