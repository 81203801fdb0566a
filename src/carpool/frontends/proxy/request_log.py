"""Logs every request once: as a call, or as refused, passed through, or abandoned by its client."""

from __future__ import annotations

import re
from collections.abc import Sequence

from carpool.core.errors import CarpoolError, Closed
from carpool.core.model import Entry
from carpool.core.ports import Clock
from carpool.dialects.keep_alive import Client, recognise
from carpool.engine import Passage
from carpool.frontends.proxy.http.responses import RequestRefused
from carpool.frontends.proxy.log import CLIENT_LEFT, LogLine, Note, redacted
from carpool.frontends.proxy.parse_head import PREFIX, request_headers
from carpool.frontends.proxy.request import Disconnected, RequestContext
from carpool.frontends.proxy.tickets import PATH as CALLS
from carpool.planners.access.providers import Hosts

LONGEST_PATH = 100
CRASHED = 500  # the server's status after an exception in the application
_OPTIONS = re.compile(r"^/@[^/]*")


class RequestLog:
    """Writes the log lines of requests."""

    def __init__(self, clock: Clock, hosts: Hosts, note: Note) -> None:
        self._clock = clock
        self._hosts = hosts
        self._note = note

    def begin(self, request: RequestContext) -> None:
        """Gives the request a log line, which the code that answers it completes."""
        request.line = LogLine(at=self._clock.now(), request=_shown(request.scope["method"], request.scope["raw_path"]))

    def ended(self, request: RequestContext, error: BaseException | None) -> None:
        """Logs the request unless its line is logged already."""
        line, scope, refused = request.line, request.scope, request.refused
        if line.status:
            return
        line.status = request.status or CRASHED
        if refused is not None:
            line.status, line.error = refused.status, refused.message
        elif isinstance(error, Disconnected):
            line.status = CLIENT_LEFT
        elif isinstance(error, CarpoolError):
            line.status, line.error = request.status or error.status, str(error)
        # Of carpool's own pages, which are polled all the time, only refusals and `/carpool/calls/` are logged.
        path = _bare(scope["raw_path"])
        if not path.startswith(PREFIX) or path.startswith(CALLS) or 400 <= line.status < CLIENT_LEFT:
            address = self._hosts.client(scope.get("client"), scope["headers"])
            self._write(line, recognise(request_headers(scope)), address)

    def call_ended(self, line: LogLine, status: int, entry: Entry | None, size: int) -> None:
        self._note(line.ended(self._clock.now(), status, entry, size))

    def call_failed(self, request: RequestContext, error: BaseException, passage: Passage | None = None) -> None:
        """Logs a call without a complete response: client disconnected, carpool shutting down, or provider unreachable.
        `passage` is the response, if it had begun."""
        status = CLIENT_LEFT if request.gone else Closed.status
        if isinstance(error, CarpoolError):
            request.line.error, status = redacted(str(error)), error.status
        if passage is None:
            self.call_ended(request.line, status, None, 0)
        else:
            chunks = passage.chunks
            self.call_ended(request.line, passage.status if chunks.answered else status, chunks.entry, chunks.size)

    def left(
        self, method: str, path: str, provider: str, client: Client, address: str, refused: RequestRefused | None
    ) -> None:
        """The client disconnected, or was refused, before the request was complete."""
        line = LogLine(at=self._clock.now(), request=_shown(method, path.encode("latin-1")), provider=provider)
        line.status = CLIENT_LEFT if refused is None else refused.status
        line.error = "" if refused is None else refused.message
        self._write(line, client, address)

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


def _shown(method: str, target: bytes) -> str:
    """Method and path, without the query and the leading options, which may be private."""
    return redacted(f"{method} {_bare(target)[:LONGEST_PATH]}".strip()) or "?"


def _bare(target: bytes) -> str:
    return _OPTIONS.sub("", target.decode("latin-1").partition("?")[0])
