"""What the tests of the proxy share."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.stage import ask, staged


@pytest.fixture
def stage_with() -> Callable[..., Any]:
    return staged


@pytest.fixture
def body() -> Callable[..., dict[str, Any]]:
    return ask
