from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from carpool.core.ports import Store
from tests.support.hosted_store import hosted
from tests.support.stores import LEASE, ME, STORES, T0

STORES["sqlite-hosted"] = hosted


@pytest.fixture(params=sorted(STORES))
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opened = await STORES[request.param](tmp_path)
    await opened.join(ME, T0, LEASE)
    yield opened
    await opened.aclose()
