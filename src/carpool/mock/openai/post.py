"""Posts one body over HTTP/1.1, and reads only the status of the response."""

import asyncio
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_PATIENCE_S = 30.0


async def post_over_http(url: str, headers: Mapping[str, str], body: bytes) -> int:
    """The response's status; OSError if there is none."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    sent = {**headers, "host": parts.netloc, "content-length": str(len(body)), "connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    async with asyncio.timeout(_PATIENCE_S):
        reader, writer = await asyncio.open_connection(
            parts.hostname, parts.port or (443 if secure else 80), ssl=secure or None
        )
        try:
            writer.write(f"POST {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)
            await writer.drain()
            match = _STATUS.match(await reader.readline())
        finally:
            writer.close()
    if match is None:
        raise ConnectionError("the answer is not HTTP")
    return int(match[1])
