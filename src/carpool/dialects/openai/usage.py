"""Read the token usage of finished responses, and of event streams while they are forwarded."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import msgspec

from carpool.core.model import Usage
from carpool.core.ports import ResponseEnd
from carpool.dialects.event_stream import Tap
from carpool.dialects.provider_api import Count, decode_or_none

_STANDARD = (None, "auto", "default")
# Tools of the provider with a fee that the response does not state.
_WITH_FEES = frozenset({"file_search_call", "code_interpreter_call", "image_generation_call", "shell_call"})
_EXPENSIVE_SEARCH = "web_search_preview"
_FREE = "moderation"


class _Input(msgspec.Struct):
    cached_tokens: Count | None = None
    cache_write_tokens: Count | None = None
    audio_tokens: Count | None = None


class _Output(msgspec.Struct):
    audio_tokens: Count | None = None
    reasoning_tokens: Count | None = None


class _Usage(msgspec.Struct):
    """`usage` as the provider sends it, with the field names of both endpoints; None means missing."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _Input | None = None
    completion_tokens_details: _Output | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    input_tokens_details: _Input | None = None
    output_tokens_details: _Output | None = None
    total_tokens: Count | None = None


class _Searches(msgspec.Struct):
    num_requests: Count = 0


class _ToolUsage(msgspec.Struct):
    web_search: _Searches | None = None


class _Typed(msgspec.Struct):
    type: str = ""


class _ModerationResult(msgspec.Struct):
    """One result of a moderation."""

    flagged: bool


class _Answer(msgspec.Struct):
    """The fields of a response that concern its price: a chat completion or chunk, a Response, embeddings, a
    moderation."""

    service_tier: str | None = None
    usage: _Usage | None = None
    model: str = ""
    output: list[_Typed] | None = None
    tools: list[_Typed] | None = None
    tool_usage: _ToolUsage | None = None
    results: list[_ModerationResult] | None = None

    def words(self, apart: bool = False) -> Usage | None:
        """None while the input or output count or a fee is missing: unknown is never zero. `apart`: reasoning tokens
        are not included in the output count, and are billed in addition."""
        if self.usage is None and self.results and _FREE in self.model:
            return Usage(0, 0)  # moderations are free and report no tokens
        if self.usage is None or any(item.type in _WITH_FEES for item in self.output or ()):
            return None
        searches = self._searches()
        tokens = _tokens(self.usage, apart)
        if searches is None or tokens is None:
            return None
        fresh, output, read, written = tokens
        tier = None if self.service_tier in _STANDARD else self.service_tier
        return Usage(fresh, output, read, written, web_searches=searches, speed=tier)

    def _searches(self) -> int | None:
        if self.tool_usage is not None and self.tool_usage.web_search is not None:
            count = self.tool_usage.web_search.num_requests
        else:
            count = sum(item.type == "web_search_call" for item in self.output or ())
        dearer = any(tool.type.startswith(_EXPENSIVE_SEARCH) for tool in self.tools or ())
        return None if count and dearer else count


def _tokens(usage: _Usage, apart: bool) -> tuple[int, int, int, int] | None:
    """Uncached input, output, cache reads, cache writes. OpenAI's input count includes cache reads and writes, its
    output count includes reasoning. Audio has another price, which is not modelled: its usage is unknown."""
    total = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    output = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
    if output is None and total == usage.total_tokens:  # embeddings
        output = 0
    if total is None or output is None:
        return None
    details = usage.input_tokens_details or usage.prompt_tokens_details or _Input()
    answered = usage.output_tokens_details or usage.completion_tokens_details or _Output()
    if details.audio_tokens or answered.audio_tokens:
        return None
    if apart:
        output += answered.reasoning_tokens or 0
    read, written = details.cached_tokens or 0, details.cache_write_tokens or 0
    return (total - read - written, output, read, written) if read + written <= total else None


class _Own(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    """A chunk of a chat completion, or an event of a Response."""

    type: str = ""
    service_tier: str | None = None
    usage: _Usage | None = None
    x_groq: _Own | None = None
    response: _Answer | None = None
    error: Any = None


_ANSWER = msgspec.json.Decoder(_Answer)
_EVENT = msgspec.json.Decoder(_Event)
_USAGE = msgspec.json.Decoder(_Usage)
# Embeddings are the only responses of that length, and their usage has no details.
_IN_THE_TAIL = re.compile(rb'"usage"\s*:\s*(\{[^{}]*\})')
_RELEVANT = re.compile(rb'"(?:usage|service_tier|response|error)"')
_DONE = b"[DONE]"
_FINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})


def of_answer(body: bytes, apart: bool = False) -> Usage | None:
    return model_and_usage(body, apart)[1]


def model_and_usage(body: bytes, apart: bool = False) -> tuple[str, Usage | None]:
    """The model and the usage of a response; empty and None if it can't be parsed."""
    answer = decode_or_none(_ANSWER, body) or _Answer()
    return answer.model, answer.words(apart)


class _Listener:
    """Keeps the usage of the last event that has one."""

    def __init__(self, apart: bool) -> None:
        self._apart = apart
        self._usage: Usage | None = None
        self._tier: str | None = None
        self._over = False  # the last event was seen
        self._failed = False

    def event(self, data: bytes) -> None:
        if _RELEVANT.search(data) is None:
            self._over |= data.strip() == _DONE
            return
        event = decode_or_none(_EVENT, data)
        if event is None:
            return
        if event.response is not None:
            if event.type in _FINAL:
                self._over = True
                self._usage = event.response.words(self._apart)
            return
        self._failed |= event.type == "error" or event.error is not None
        self._tier = event.service_tier or self._tier
        usage = event.usage or (event.x_groq or _Own()).usage
        if usage is not None:
            self._usage = _Answer(self._tier, usage).words(self._apart)

    def usage(self) -> Usage | None:
        return self._usage

    def end(self, whole: bool) -> ResponseEnd:
        """Some OpenAI-compatible providers send no `[DONE]`: the end of the body counts as well."""
        over = whole or self._over
        return ResponseEnd(self._usage, over or self._failed, over and not self._failed)


def _of_tail(end: bytes) -> Usage | None:
    matches = _IN_THE_TAIL.findall(end)
    return _Answer(usage=decode_or_none(_USAGE, matches[-1])).words() if matches else None


def tap(apart: bool = False) -> Tap:
    return Tap(_Listener(apart), partial(of_answer, apart=apart), _of_tail)
