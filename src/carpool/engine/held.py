"""The answer to a call that was held back and can't go in time."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

from carpool.errors import TooBusy, Unwell
from carpool.model import Headers
from carpool.ports import Dialect


class OwnAnswer:
    """An answer that carpool gives itself, in the provider's shape. Implements `ports.WireResponse`."""

    def __init__(self, error: TooBusy | Unwell, dialect: Dialect) -> None:
        self.status = error.status
        self._body = dialect.error(error.status, error.code, str(error))
        length = str(len(self._body))
        after = str(math.ceil(error.retry_after))
        self.headers: Headers = (
            ("content-type", "application/json"),
            ("content-length", length),
            ("retry-after", after),
        )

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._body

    async def read(self) -> bytes:
        return self._body

    async def aclose(self) -> None:
        return
