"""carpool's options for a call, from headers, a path segment or arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal
from urllib.parse import unquote

from msgspec.structs import replace

from carpool.core.errors import BadCall
from carpool.core.model import Headers, Lane
from carpool.planners.options import Options
from carpool.planners.policy import parse_budget

__all__ = ["Options", "from_headers", "from_segment", "parse_key", "parse_lane", "split_path"]

PREFIX = "x-carpool-"
MAX_KEY = 255
MAX_TAGS = 50
MAX_TAG_NAME = 100
MAX_TAG = 500
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def from_headers(headers: Headers) -> Options:
    """Options from `x-carpool-*` headers. They override the other sources."""
    return _read((name.removeprefix(PREFIX), value) for name, value in headers if name.startswith(PREFIX))


def from_segment(segment: str) -> Options:
    """Options from a first path segment such as `@budget=30m,tags.team=ci`, for clients that only take a base URL."""
    pairs = []
    for part in unquote(segment).removeprefix("@").split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise BadCall(f"{part[:60]!r} in the path is not an option. Write @name=value, as in @budget=30m.")
        pairs.append((name.strip(), value.strip()))
    return _read(pairs)


def split_path(path: str) -> tuple[Options, str]:
    """The leading options of a path, and the path without them."""
    if not path.startswith("/@"):
        return Options(), path
    segment, _, rest = path[1:].partition("/")
    return from_segment(segment), "/" + rest


def _read(pairs: Iterable[tuple[str, str]]) -> Options:
    options = Options()
    for name, value in pairs:
        if _CONTROL.search(name) or _CONTROL.search(value):
            raise BadCall(f"The option {name[:60]!r} holds a control character. Take it out.")
        options = _with(options, name, value)
    _check_tags(options.tags)
    return options


def _check_tags(tags: Mapping[str, str]) -> None:
    """Bounds the tags, because they are stored and logged with every call."""
    if len(tags) > MAX_TAGS:
        raise BadCall(f"This call has {len(tags)} tags; it may have {MAX_TAGS}.")
    for name, value in tags.items():
        if len(name) > MAX_TAG_NAME or len(value) > MAX_TAG:
            raise BadCall(
                f"The tag {name[:60]!r} is too long: a name has at most {MAX_TAG_NAME} characters, a value {MAX_TAG}."
            )


def _with(options: Options, name: str, value: str) -> Options:
    if name == "budget":
        return replace(options, budget=parse_budget(value))
    if name == "lane":
        return replace(options, lane=parse_lane(value))
    if name == "tags":
        return replace(options, tags={**options.tags, **_tags(value)})
    if name.startswith("tags."):
        return replace(options, tags={**options.tags, name.removeprefix("tags."): value})
    if name == "key":
        return replace(options, key=parse_key(value))
    if name == "provider":
        return replace(options, provider=value.strip())
    if name == "on-disconnect":
        return replace(options, on_disconnect=_on_disconnect(value))
    raise BadCall(
        f"carpool knows no option {name[:60]!r}. It knows budget, lane, tags, key, provider and on-disconnect."
    )


def _on_disconnect(text: str) -> Literal["keep", "cancel"]:
    value = text.strip().lower()
    if value == "keep":
        return "keep"
    if value == "cancel":
        return "cancel"
    raise BadCall(f"{text[:40]!r} does not say what becomes of a call whose client hangs up: write keep or cancel.")


def parse_lane(text: str) -> Lane:
    try:
        return Lane(str(text).strip().lower())
    except ValueError:
        *others, last = Lane
        raise BadCall(f"{str(text)[:60]!r} is not a lane. The lanes are {', '.join(others)} and {last}.") from None


def parse_key(text: str) -> str:
    if not isinstance(text, str):
        raise BadCall(f"A key has 1 to {MAX_KEY} characters; this one is a {type(text).__name__}.")
    if not 0 < len(text) <= MAX_KEY:
        raise BadCall(f"A key has 1 to {MAX_KEY} characters; this one has {len(text)}.")
    return text


def _tags(text: str) -> dict[str, str]:
    tags = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise BadCall(f"{part[:60]!r} is not a tag. Write tags as name=value, separated by commas.")
        tags[name.strip()] = value.strip()
    return tags
