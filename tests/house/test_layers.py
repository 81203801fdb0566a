from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from . import layers
from .sources import Module, modules

Checker = Callable[[Sequence[Module]], list[str]]


@pytest.mark.parametrize("checker", [layers.wrong_directions, layers.cycles, layers.impure, layers.dead])
def test_carpool(checker: Checker) -> None:
    broken = checker(modules())
    assert not broken, "\n".join(broken)


def package(**texts: str) -> list[Module]:
    """Modules by name, two underscores for a dot: `package(engine__tasks="…")`. The names they use exist too."""
    named = {"carpool": "", **{f"carpool.{name.replace('__', '.')}": text for name, text in texts.items()}}
    return [Module(name, text, is_package=name == "carpool") for name, text in named.items()]


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        ({"model": "from carpool.engine import Engine", "engine": "x = 1"}, "carpool.model:1 imports carpool.engine"),
        ({"stores__sqlite": "import carpool.engine", "engine": ""}, "imports point downwards"),
        ({"stores__sqlite": "from ..doors import library", "doors__library": ""}, "stands above `stores`"),
        ({"stores__sqlite": "from carpool.dialects import anthropic", "dialects": ""}, "side by side"),
        ({"dialects__anthropic": "from carpool.clock import SystemClock", "clock": ""}, "side by side"),
        ({"errors": "from carpool import Fleet"}, "`carpool` stands above `errors`"),
        ({"mock__app": "from carpool.model import Usage", "model": ""}, "the mock shares no code"),
        ({"engine": "def f():\n    import carpool.mock", "mock": ""}, "carpool.engine:2 imports carpool.mock: only"),
        ({"gadget": ""}, "carpool.gadget stands in no layer"),
        (
            {
                "ports": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from carpool.engine import E",
                "engine": "",
            },
            "carpool.ports:3",
        ),
    ],
)
def test_a_wrong_import_is_found(texts: dict[str, str], sentence: str) -> None:
    found = layers.wrong_directions(package(**texts))
    assert len(found) == 1
    assert sentence in found[0]


def test_right_imports_are_left_alone() -> None:
    fine = package(
        engine="from carpool import errors\nfrom carpool.pooling import plan\nimport asyncio",
        pooling="from .forecast import chance",
        forecast="from carpool.errors import CarpoolError",
        errors="import json",
        cli="from carpool.mock import app\nfrom carpool import FleetDispatcher\nfrom carpool.engine import Engine",
        mock="from carpool.mock.clock import wall",
        mock__clock="",
        stores__sqlite="from carpool.clock import SystemClock",
        clock="",
    )
    assert layers.wrong_directions(fine) == []
    assert layers.cycles(fine) == []


def test_a_circle_is_found() -> None:
    circle = package(
        routing="import carpool.pooling", pooling="import carpool.forecast", forecast="import carpool.routing"
    )
    assert [sentence.split()[0] for sentence in layers.cycles(circle)] == ["`forecast`", "`pooling`", "`routing`"]


def test_an_impure_planner_is_found() -> None:
    assert "carpool.pooling:2 imports asyncio" in layers.impure(package(pooling="import json\nimport asyncio"))[0]
    assert layers.impure(package(dialects__anthropic="from time import time"))
    assert not layers.impure(package(engine="import asyncio"))


def test_a_dead_module_is_found() -> None:
    texts = {
        "cli": "from carpool.doors import library\nserver = 'carpool.doors.proxy:app'",
        "doors__library": "",
        "doors__proxy": "import carpool.model",
        "model": "x = 1",
        "old": "import carpool.older",
        "older": "import carpool.old",
    }
    assert [sentence.split()[0] for sentence in layers.dead(package(**texts))] == ["carpool.old", "carpool.older"]
