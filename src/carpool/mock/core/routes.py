"""Which handler answers which request."""

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from carpool.mock.core.bill import Kind
from carpool.mock.core.http import Reply, Request

Handler = Callable[..., Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Route:
    name: str
    method: str
    pattern: re.Pattern[str]
    handler: Handler
    kind: Kind = "sync"


def route(name: str, method: str, path: str, handler: Handler, kind: Kind = "sync") -> Route:
    return Route(name, method, re.compile(path.replace("{id}", "([^/]+)")), handler, kind)


def find_route(routes: Iterable[Route], request: Request) -> tuple[Route, tuple[str, ...]] | None:
    for one in routes:
        match = one.pattern.fullmatch(request.path)
        if match is not None and one.method == request.method:
            return one, match.groups()
    return None
