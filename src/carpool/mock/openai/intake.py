"""Reads a batch's file: errors that fail it as a whole, errors of single requests, and the requests to run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from carpool.mock.core.blocks import canonical
from carpool.mock.core.config import MockConfig
from carpool.mock.core.errors import ApiError
from carpool.mock.core.fate import Fate
from carpool.mock.core.faults import FaultBox
from carpool.mock.openai.batch import OpenAIBatch, Problem, Refused, problem
from carpool.mock.openai.config import OpenAIConfig
from carpool.mock.openai.digest import Asked
from carpool.mock.openai.embeddings import inputs_of
from carpool.mock.openai.models import find_model
from carpool.mock.openai.orders import Order
from carpool.mock.openai.sale import PATHS, read

_YIELD_EVERY = 1000
_BULKY = ("messages", "input", "prompt")  # what an answer does not need again
_SHARED = ("instructions", "tools", "text", "metadata")  # what is often the same in all lines


@dataclass(slots=True)
class Contents:
    """What was read of a file."""

    model: str | None = None
    custom_ids: list[str] = field(default_factory=list)
    requests: list[Asked | Refused] = field(default_factory=list)
    tokens: int = 0
    flaw: Problem | None = None


class _Flawed(Exception):
    def __init__(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.problem = problem(code, message, line, param)


async def read_file(data: bytes, order: Order, mean_output: int, limits: OpenAIConfig) -> Contents:
    """Reads all of it, yielding to the event loop in between. It ends at the first error, and returns only that."""
    reader = _Reader(order, mean_output, limits)
    try:
        reader.begin(data)
        for number, line in enumerate(_lines(data), 1):
            if number % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
            reader.take(number, line)
        reader.finish()
    except _Flawed as flawed:
        return Contents(reader.contents.model, flaw=flawed.problem)
    return reader.contents


def _lines(data: bytes) -> Iterator[memoryview]:
    """Without copying them; a last line may have no end."""
    view, start = memoryview(data), 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        yield view[start:end]
        start = end + 1


class _Reader:
    """Reads the lines. Codes that were never observed are those that Azure documents."""

    def __init__(self, order: Order, mean_output: int, limits: OpenAIConfig) -> None:
        self.contents = Contents()
        self._habits = limits.habits
        self._model = order.model
        self._limits = limits
        self._inputs = 0
        self._endpoint = order.endpoint
        self._mean_output = mean_output
        self._seen: set[str] = set()
        self._shared: dict[bytes, Any] = {}

    def begin(self, data: bytes) -> None:
        if not data.strip():
            raise _Flawed("empty_file", "The input file is empty.")
        if len(data) > self._limits.most_bytes:
            message = f"The file is larger than the {self._limits.most_bytes:,} bytes allowed."
            raise _Flawed("file_too_large", message)

    def take(self, number: int, line: memoryview) -> None:
        if number > self._limits.most_requests:
            message = f"The file holds more than the {self._limits.most_requests:,} requests allowed."
            raise _Flawed("too_many_tasks", message)
        if self._habits.max_line is not None and len(line) > self._habits.max_line:
            raise _Flawed("line_too_large", f"Line {number} is larger than {self._habits.max_line:,} bytes.", number)
        body = self._envelope(number, _object(number, line))
        if self._model is not None:  # the batch says which
            body = {**body, "model": self._model}
        self._check_model(number, body)
        if body.get("stream"):
            raise _Flawed(
                "streaming_unsupported", "Streaming is not supported in the Batch API.", number, "body.stream"
            )
        if body.get("background"):
            raise _Flawed("invalid_request", "Background is not supported in the Batch API.", number, "body.background")
        request = self._request(body)
        self.contents.requests.append(request)
        if isinstance(request, Asked):
            self.contents.tokens += request.input_tokens
            self._inputs += len(inputs_of(body)) if request.endpoint == "embeddings" else 0

    def finish(self) -> None:
        if self._inputs > self._limits.max_embedding_inputs:
            message = f"The file holds more than the {self._limits.max_embedding_inputs:,} embedding inputs allowed."
            raise _Flawed("too_many_tasks", message)

    def _envelope(self, number: int, line: dict[str, Any]) -> dict[str, Any]:
        plain = self._habits.plain_lines
        for name in ("custom_id", "body") if plain else ("custom_id", "method", "url", "body"):
            if line.get(name) is None:
                raise _Flawed("missing_required_parameter", f"Missing required parameter: '{name}'.", number, name)
        custom_id, body = line["custom_id"], line["body"]
        if not isinstance(custom_id, str) or not isinstance(body, dict):
            raise _Flawed("invalid_request", "custom_id must be a string and body an object.", number)
        if custom_id in self._seen:
            message = f"The custom_id for this request is a duplicate of another request: '{custom_id}'."
            raise _Flawed("duplicate_custom_id", message, number, "custom_id")
        if not plain and line["method"] != "POST":
            raise _Flawed("invalid_method", "The method must be POST.", number, "method")
        if not plain and line["url"] != self._endpoint:
            message = f"The URL provided for this request does not match the batch endpoint {self._endpoint}."
            raise _Flawed("invalid_url", message, number, "url")
        self._seen.add(custom_id)
        self.contents.custom_ids.append(custom_id)
        return body

    def _check_model(self, number: int, body: dict[str, Any]) -> None:
        model = body.get("model")
        if not isinstance(model, str):
            raise _Flawed("missing_required_parameter", "Missing required parameter: 'model'.", number, "body.model")
        if self.contents.model is None:
            spec = find_model(model)
            if spec is None or not spec.batch:
                message = f"The provided model '{model}' is not supported by the Batch API."
                raise _Flawed("model_not_found", message, number, "body.model")
            self.contents.model = model
        if model != self.contents.model:
            message = f"The provided model '{model}' does not match the model '{self.contents.model}' of this batch."
            raise _Flawed("mismatched_model", message, number, "body.model")

    def _request(self, body: dict[str, Any]) -> Asked | Refused:
        try:
            asked = read(PATHS[self._endpoint], body, self._mean_output)
        except ApiError as error:
            return Refused(error.kind, error.message, self._habits.status(error), self._habits.error(error))
        if asked.endpoint in ("embeddings", "moderations"):
            return asked
        # Tens of thousands are kept until their batch is collected: only what an answer repeats, and that once.
        kept = {name: value for name, value in body.items() if name not in _BULKY}
        kept |= {name: self._shared.setdefault(canonical(kept[name]), kept[name]) for name in _SHARED if name in kept}
        return msgspec.structs.replace(asked, body=kept, tier="default")


def _object(number: int, line: memoryview) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(line)
    except msgspec.DecodeError:
        decoded = None
    if not isinstance(decoded, dict):
        raise _Flawed("invalid_json_line", "This line is not parseable as valid JSON.", number)
    return decoded


class OpenAIIntake:
    """Creates a batch from the requests."""

    def __init__(self, config: MockConfig, rng: random.Random, box: FaultBox) -> None:
        self._fate = Fate(config, rng, box)

    def make(
        self,
        project: str,
        credential: str,
        contents: Contents,
        order: Order,
        now: float,
        *,
        keep_files_s: float | None = None,
        stranger: bool = False,
    ) -> OpenAIBatch:
        fate, config, own = self._fate, self._fate.config, self._fate.config.openai
        validated = now + own.validation_latency.draw(fate.rng)
        latency = own.batch_latency or config.batch_latency
        starts, ends = fate.times(now, contents.requests, latency, not_before=validated)
        batch = OpenAIBatch(
            id=f"batch_{fate.rng.getrandbits(96):024x}",
            workspace=project,
            credential=credential,
            created=now,
            expires=now + config.expiry_s,
            seed=fate.rng.getrandbits(64),
            custom_ids=contents.custom_ids,
            requests=contents.requests,
            starts=starts,
            ends=ends,
            line_faults=fate.line_faults(len(contents.requests), stranger),
            listed_from=fate.listed_from(now, stranger),
            clock_offset=fate.box.faults.clock_offset_s,
            stranger=stranger,
            endpoint=order.endpoint,
            model=contents.model,
            input_file_id=order.file_id,
            window=order.window,
            metadata=order.metadata,
            name=order.name,
            house=own.vendor,
            tokens=contents.tokens,
            validated_at=validated,
            finalize_s=own.finalizing_latency.draw(fate.rng),
            keep_files_s=own.keep_files_s if keep_files_s is None else keep_files_s,
            flaw=contents.flaw,
            crowded=not stranger and fate.box.roll("token_limit"),
        )
        fate.may_stick(batch, now)
        fate.may_be_forgotten(batch, now)
        return batch
