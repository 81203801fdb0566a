import pytest

from tests.support.fleets import quick_looks


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_looks(monkeypatch)
