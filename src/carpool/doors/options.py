"""What a client may ask for beside its call: budget, lane, tags, key; from headers, a path segment or arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

from carpool.errors import BadCall
from carpool.model import Headers, Lane
from carpool.policy import parse_budget

PREFIX = "x-carpool-"
MAX_KEY = 255


@dataclass(frozen=True, slots=True)
class Options:
    budget: float | None = None  # seconds from arrival
    deadline: float | None = None  # absolute; wins over the budget
    lane: Lane | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None

    def over(self, weaker: Options) -> Options:
        """These options, completed from weaker ones."""
        timed = self.budget is not None or self.deadline is not None
        return Options(
            budget=self.budget if timed else weaker.budget,
            deadline=self.deadline if timed else weaker.deadline,
            lane=self.lane or weaker.lane,
            tags={**weaker.tags, **self.tags},
            key=self.key or weaker.key,
        )

    def until(self, arrived: float) -> float | None:
        if self.deadline is not None:
            return self.deadline
        return None if self.budget is None else arrived + self.budget


def from_headers(headers: Headers) -> Options:
    """Options from `x-carpool-*` headers; the strongest source."""
    return _read((name.removeprefix(PREFIX), value) for name, value in headers if name.startswith(PREFIX))


def from_segment(segment: str) -> Options:
    """Options from a first path segment such as `@budget=30m,tags.team=ci`, for clients that only take a base URL."""
    pairs = []
    for part in unquote(segment).removeprefix("@").split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise BadCall(f"{part!r} in the path is not an option. Write @name=value, as in @budget=30m.")
        pairs.append((name.strip(), value.strip()))
    return _read(pairs)


def split_path(path: str) -> tuple[Options, str]:
    """The options in front of a path, and the path without them."""
    if not path.startswith("/@"):
        return Options(), path
    segment, _, rest = path[1:].partition("/")
    return from_segment(segment), "/" + rest


def _read(pairs: Iterable[tuple[str, str]]) -> Options:
    options = Options()
    for name, value in pairs:
        options = _with(options, name, value)
    return options


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
    raise BadCall(f"carpool knows no option {name!r}. It knows budget, lane, tags and key.")


def parse_lane(text: str) -> Lane:
    try:
        return Lane(str(text).strip().lower())
    except ValueError:
        raise BadCall(f"{text!r} is not a lane. The lanes are {', '.join(Lane)}.") from None


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
            raise BadCall(f"{part!r} is not a tag. Write tags as name=value, separated by commas.")
        tags[name.strip()] = value.strip()
    return tags
