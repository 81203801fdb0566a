"""carpool's options for a call, apart from its body: budget, task, lane, tags, key, provider. A client sets them in
headers or in a path segment, the library by arguments, and rules and profiles fill the gaps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Literal
from urllib.parse import unquote

from msgspec import field
from msgspec.structs import replace

from carpool.core.errors import BadCall
from carpool.core.model import CachingMode, Headers, Lane, Value
from carpool.planners.policy import parse_budget, span

PREFIX = "x-carpool-"
MAX_KEY = 255
MAX_TAGS = 50
MAX_TAG_NAME = 100
MAX_TAG = 500
MAX_TASK = 200
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Options(Value, frozen=True, gc=False):
    budget: float | None = None  # seconds from arrival
    deadline: float | None = None  # absolute; wins over the budget
    lane: Lane | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    provider: str | None = None
    task: str | None = None  # the name of the task that the call belongs to
    task_budget: float | None = None  # seconds from the first call of the task that brings one
    task_deadline: float | None = None  # absolute; wins over the task's budget
    longest: float | None = None  # seconds that a rule or key allows at most, whatever the task's deadline
    on_disconnect: Literal["keep", "cancel"] | None = None
    caching: CachingMode | None = None
    insists: bool = True  # False where a rule chose the lane: a call that can't take it is routed as if it had none
    note: str = ""  # what a rule adds to the reason of the lane

    @property
    def timed(self) -> bool:
        return self.budget is not None or self.deadline is not None

    @property
    def tasked(self) -> bool:
        """Whether they say when the task must be done."""
        return self.task_budget is not None or self.task_deadline is not None

    @property
    def may_wait(self) -> bool:
        """Whether they give the call time, or may do so: a task that is only named may have a deadline already."""
        return self.timed or self.tasked or self.task is not None

    def over(self, weaker: Options) -> Options:
        """These options, with gaps filled from weaker ones."""
        return Options(
            budget=self.budget if self.timed else weaker.budget,
            deadline=self.deadline if self.timed else weaker.deadline,
            lane=self.lane or weaker.lane,
            tags={**weaker.tags, **self.tags},
            key=self.key or weaker.key,
            provider=self.provider or weaker.provider,
            task=self.task or weaker.task,
            task_budget=self.task_budget if self.tasked else weaker.task_budget,
            task_deadline=self.task_deadline if self.tasked else weaker.task_deadline,
            on_disconnect=self.on_disconnect or weaker.on_disconnect,
            caching=self.caching or weaker.caching,
            insists=self.insists if self.lane else weaker.insists,
            note=self.note or weaker.note,
        )

    def until(self, arrived: float) -> float | None:
        if self.deadline is not None:
            return self.deadline
        return None if self.budget is None else arrived + self.budget


def from_headers(headers: Headers) -> Options:
    """Options from `x-carpool-*` headers. They override the other sources."""
    return _read((name.removeprefix(PREFIX), value) for name, value in headers if name.startswith(PREFIX))


def split_path(path: str) -> tuple[Options, str]:
    """The options in a first path segment such as `@budget=30m,tags.team=ci`, for clients that only take a base URL;
    and the path without them."""
    if not path.startswith("/@"):
        return Options(), path
    segment, _, rest = path[1:].partition("/")
    pairs = []
    for part in unquote(segment).removeprefix("@").split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise BadCall(f"{part[:60]!r} in the path is not an option. Write @name=value, as in @budget=30m.")
        pairs.append((name.strip(), value.strip()))
    return _read(pairs), "/" + rest


def _read(pairs: Iterable[tuple[str, str]]) -> Options:
    fields: dict[str, Any] = {}
    tags: dict[str, str] = {}
    for name, value in pairs:
        if _CONTROL.search(name) or _CONTROL.search(value):
            raise BadCall(f"The option {name[:60]!r} holds a control character. Take it out.")
        name = name if name.startswith("tags.") else name.replace("_", "-")
        if name == "tags":
            tags |= _tags(value)
        elif name.startswith("tags."):
            tags[name.removeprefix("tags.")] = value
        elif name in _PARSERS:
            fields[name.replace("-", "_")] = _PARSERS[name](value)
        else:
            raise BadCall(f"carpool knows no option {name[:60]!r}. It knows {', '.join(_PARSERS)} and tags.")
    if len(tags) > MAX_TAGS:  # tags are stored and logged with every call
        raise BadCall(f"This call has {len(tags)} tags; it may have {MAX_TAGS}.")
    for name, value in tags.items():
        if len(name) > MAX_TAG_NAME or len(value) > MAX_TAG:
            raise BadCall(
                f"The tag {name[:60]!r} is too long: a name has at most {MAX_TAG_NAME} characters, a value {MAX_TAG}."
            )
    return Options(tags=tags, **fields)


def _on_disconnect(text: str) -> str:
    value = text.strip().lower()
    if value not in ("keep", "cancel"):
        raise BadCall(
            f"{text[:40]!r} does not say what happens to a call whose client disconnects: write keep or cancel."
        )
    return value


def parse_lane(text: str) -> Lane:
    try:
        return Lane(str(text).strip().lower())
    except ValueError:
        *others, last = Lane
        raise BadCall(f"{str(text)[:60]!r} is not a lane. The lanes are {', '.join(others)} and {last}.") from None


def parse_caching(text: str) -> CachingMode:
    try:
        return CachingMode(str(text).strip().lower())
    except ValueError:
        raise BadCall(f"{str(text)[:40]!r} is not a mode of caching: write off, observe or plan.") from None


def parse_key(text: str) -> str:
    if not isinstance(text, str):
        raise BadCall(f"A key has 1 to {MAX_KEY} characters; this one is a {type(text).__name__}.")
    if not 0 < len(text) <= MAX_KEY:
        raise BadCall(f"A key has 1 to {MAX_KEY} characters; this one has {len(text)}.")
    return text


def parse_task(text: str) -> str:
    if not isinstance(text, str):
        raise BadCall(f"A task's name has 1 to {MAX_TASK} characters; this one is a {type(text).__name__}.")
    name = text.strip()
    if not 0 < len(name) <= MAX_TASK or _CONTROL.search(name):
        which = f"this one has {len(name)}" if not 0 < len(name) <= MAX_TASK else "this one has a control character"
        raise BadCall(f"A task's name has 1 to {MAX_TASK} characters, none of them a control character; {which}.")
    return name


def _point_in_time(text: str) -> float:
    try:
        then = datetime.fromisoformat(text.strip())
    except ValueError:
        then = None
    if then is None or then.tzinfo is None:
        raise BadCall(
            f"{text[:40]!r} is not a point in time: write date, time and time zone, as in 2027-01-31T07:00:00+01:00."
        )
    return then.timestamp()


def _tags(text: str) -> dict[str, str]:
    tags = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise BadCall(f"{part[:60]!r} is not a tag. Write tags as name=value, separated by commas.")
        tags[name.strip()] = value.strip()
    return tags


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "budget": parse_budget,
    "lane": parse_lane,
    "key": parse_key,
    "provider": str.strip,
    "task": parse_task,
    "task-budget": parse_budget,
    "task-deadline": _point_in_time,
    "on-disconnect": _on_disconnect,
    "caching": parse_caching,
}


# ---------------------------------------------------------------- limits of rules and profiles


def capped(options: Options, most: float | None, whose: str, now: float) -> Options:
    """Limit the budget to `most` seconds (None: no limit). `whose` names the origin of the limit in the note."""
    if most is None or options.lane is Lane.NOW:
        return options
    until = options.until(now)
    if until is None and options.lane is None:  # it is sent at once, which no limit forbids, unless its task can wait
        return replace(options, longest=most) if options.may_wait else options
    if until is not None and until <= now + most:
        return options
    note = f"{whose} allows a budget of at most {span(most)}."
    return replace(options, budget=most, deadline=None, note=f"{options.note} {note}".lstrip())
