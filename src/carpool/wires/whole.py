"""Answers that are here as a whole, as nearly all short ones are: read at one go, without the parser.

Only the plainest form is read so, of which there can be no two opinions. Everything else is for the parser: it has not
seen any of it yet.
"""

from __future__ import annotations

import re

from carpool.model import Headers

_HEAD = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9]{2}) [\t -~\x80-\xff]*+\r\n"
    rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]++: [!-~\x80-\xff][\t -~\x80-\xff]*+(?<![\t ])\r\n)++)\r\n"
)
_BODYLESS = frozenset({204, 304})
_ALIVE = ("keep-alive", "Keep-Alive")


def whole(data: bytes, method: str) -> tuple[int, Headers, bytes] | None:
    """The status, the headers and the body, where the data are one answer of a known length and nothing else, after
    which the connection stays."""
    found = _HEAD.match(data)
    if found is None or method == "HEAD":
        return None
    status, fields, end = int(found[1]), found[2], found.end()
    lines = fields[:-2].decode("latin-1").split("\r\n")
    headers = tuple([(name.lower(), value) for name, _, value in [line.partition(": ") for line in lines]])
    told = dict(headers)
    if status in _BODYLESS or told.get("content-length") != str(len(data) - end):
        return None
    if "transfer-encoding" in told or "upgrade" in told or told.get("connection", "keep-alive") not in _ALIVE:
        return None
    if len(told) < len(headers) and not _once(headers):
        return None
    return status, headers, data[end:]


def _once(headers: Headers) -> bool:
    """Whether what decides about the end of the answer, and of the connection, is said once at most."""
    names = [name for name, _ in headers]
    return names.count("content-length") == 1 and names.count("connection") < 2
