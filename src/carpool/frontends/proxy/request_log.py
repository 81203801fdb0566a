"""Logs requests that did not become calls: refused, passed through, or abandoned by their client."""

from __future__ import annotations

import re
from collections.abc import Sequence

from carpool.core.errors import CarpoolError
from carpool.core.ports import Clock
from carpool.dialects.keep_alive import Client, recognise
from carpool.frontends.proxy.admin import PREFIX
from carpool.frontends.proxy.http.asgi import Disconnected, Scope, request_headers
from carpool.frontends.proxy.http.responses import REFUSED, RequestRefused
from carpool.frontends.proxy.log import LogLine, Note, redacted
from carpool.frontends.proxy.parse_head import ParsedHead
from carpool.frontends.proxy.relay import CLIENT_LEFT
from carpool.frontends.proxy.tickets import PATH as CALLS
from carpool.planners.access.hosts import Hosts

LONGEST_PATH = 100
CRASHED = 500  # the server's status after an exception in the application
_OPTIONS = re.compile(r"^/@[^/]*")


class RequestLog:
    """Logs every request that has no line as a call, once."""

    def __init__(self, clock: Clock, hosts: Hosts, note: Note) -> None:
        self._clock = clock
        self._hosts = hosts
        self._note = note

    def begin(self, scope: Scope) -> LogLine:
        """A new log line, which the code that answers the request completes."""
        return LogLine(at=self._clock.now(), request=_shown(scope["method"], scope["raw_path"]))

    def ended(self, line: LogLine, scope: Scope, sent: int, error: BaseException | None) -> None:
        """Logs the request unless its line is logged already. `sent`: the status of the response, 0 if none started."""
        if line.status:
            return
        line.status = sent or CRASHED
        refused: RequestRefused | None = scope.get(REFUSED)
        if refused is not None:
            line.status, line.error = refused.status, refused.message
        elif isinstance(error, Disconnected):
            line.status = CLIENT_LEFT
        elif isinstance(error, CarpoolError):
            line.status, line.error = sent or error.status, str(error)
        if _of_interest(line, scope):
            self._write(
                line, recognise(request_headers(scope)), self._hosts.client(scope.get("client"), scope["headers"])
            )

    def left(self, parsed_head: ParsedHead, scope: Scope) -> None:
        """The client disconnected, or was refused, before the request was complete."""
        line = LogLine(
            at=self._clock.now(), request=_shown(parsed_head.method, parsed_head.head.path.encode("latin-1"))
        )
        refused: RequestRefused | None = scope.get(REFUSED)
        line.status = CLIENT_LEFT if refused is None else refused.status
        line.error = "" if refused is None else refused.message
        if parsed_head.head.upstream is not None:
            line.provider = parsed_head.head.upstream.provider
        self._write(line, parsed_head.head.client, parsed_head.address)

    def refused(
        self,
        refused: RequestRefused,
        method: str,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        peer: tuple[str, int] | None,
    ) -> None:
        """The server refused the request. Logs as much of it as was read."""
        line = LogLine(
            at=self._clock.now(), request=_shown(method, target), status=refused.status, error=refused.message
        )
        self._write(line, recognise(request_headers({"headers": headers})), self._hosts.client(peer, headers))

    def _write(self, line: LogLine, client: Client, address: str) -> None:
        line.client = f"{client.kind} {client.name}".rstrip()
        line.address = address
        line.error = redacted(line.error)
        line.duration_s = self._clock.now() - line.at
        self._note(line)


def _of_interest(line: LogLine, scope: Scope) -> bool:
    """Whether to log it. Of carpool's own pages, which are polled all the time, only refusals and `/carpool/calls/`."""
    path = _bare(scope["raw_path"])
    if not path.startswith(PREFIX) or path.startswith(CALLS):
        return True
    return 400 <= line.status < CLIENT_LEFT


def _shown(method: str, target: bytes) -> str:
    """Method and path, without the query and the leading options, which may be private."""
    return redacted(f"{method} {_bare(target)[:LONGEST_PATH]}".strip()) or "?"


def _bare(target: bytes) -> str:
    return _OPTIONS.sub("", target.decode("latin-1").partition("?")[0])
