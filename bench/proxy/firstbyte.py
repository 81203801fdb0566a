"""Opens streams one after the other and tells how long the first byte took: `python firstbyte.py URL PATH STREAMS`"""

from __future__ import annotations

import http.client
import json
import statistics
import sys
import time
from urllib.parse import urlsplit

from bodies import HEADERS, MARK, request


def once(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[float, float]:
    """Seconds to the first byte of the body, and to the last."""
    started = time.perf_counter()
    connection.request("POST", path, body, HEADERS)
    response = connection.getresponse()
    first = response.read1(65536)
    at_first = time.perf_counter() - started
    rest = response.read()
    if response.status != 200 or MARK.encode() not in first + rest:
        raise SystemExit(f"Not the stream that was asked for, status {response.status}: {(first + rest)[:200]!r}")
    return at_first, time.perf_counter() - started


def main() -> None:
    url, path, streams = urlsplit(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
    body = request(path, stream=True)
    for _ in range(3):  # connections and caches
        once(connection, path, body)
    times = [once(connection, path, body) for _ in range(streams)]
    firsts = sorted(first for first, _ in times)
    result = {
        "streams": streams,
        "first_ms": statistics.median(firsts) * 1e3,
        "first_p90_ms": firsts[int(len(firsts) * 0.9)] * 1e3,
        "whole_ms": statistics.median(last for _, last in times) * 1e3,
    }
    sys.stdout.write(json.dumps({name: round(value, 3) for name, value in result.items()}) + "\n")


if __name__ == "__main__":
    main()
