from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.support import ROOT

from . import layers
from .sources import Module, modules

Checker = Callable[[Sequence[Module]], list[str]]


@pytest.mark.parametrize(
    "checker", [layers.wrong_directions, layers.cycles, layers.impure, layers.dead, layers.doubled_names]
)
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
        (
            {"core__model": "from carpool.engine import E", "engine": "x = 1"},
            "carpool.core.model:1 imports carpool.engine",
        ),
        ({"stores__sqlite": "import carpool.engine", "engine": ""}, "imports point downwards"),
        ({"stores__sqlite": "from ..frontends import library", "frontends__library": ""}, "stands above `stores`"),
        ({"stores__sqlite": "from carpool.dialects import anthropic", "dialects": ""}, "side by side"),
        (
            {"dialects__anthropic": "from carpool.core.clock import SystemClock", "core__clock": ""},
            "gets the time passed in",
        ),
        ({"core__errors": "from carpool import Fleet"}, "`carpool` stands above `core`"),
        ({"mock__app": "from carpool.core.model import Usage", "core__model": ""}, "the mock shares no code"),
        ({"engine": "def f():\n    import carpool.mock", "mock": ""}, "carpool.engine:2 imports carpool.mock: only"),
        ({"gadget": ""}, "carpool.gadget stands in no layer"),
        (
            {
                "core__ports": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from carpool.engine import E",
                "engine": "",
            },
            "carpool.core.ports:3",
        ),
    ],
)
def test_a_wrong_import_is_found(texts: dict[str, str], sentence: str) -> None:
    found = layers.wrong_directions(package(**texts))
    assert len(found) == 1
    assert sentence in found[0]


def test_right_imports_are_left_alone() -> None:
    fine = package(
        engine="from carpool.core import errors\nfrom carpool.planners.pooling import plan\nimport asyncio",
        planners__pooling="from .forecast import chance",
        planners__forecast="from carpool.core.errors import CarpoolError",
        core__errors="import json",
        cli="from carpool.mock import app\nfrom carpool import FleetDispatcher\nfrom carpool.engine import Engine",
        mock="from carpool.mock.clock import wall",
        mock__clock="",
        stores__sqlite="from carpool.core.clock import SystemClock",
        core__clock="",
    )
    assert layers.wrong_directions(fine) == []
    assert layers.cycles(fine) == []


def test_a_circle_is_found() -> None:
    circle = package(
        planners__routing="import carpool.planners.pooling",
        planners__pooling="import carpool.planners.forecast",
        planners__forecast="import carpool.planners.routing",
    )
    names = [f"`planners.{name}`" for name in ("forecast", "pooling", "routing")]
    assert [sentence.split()[0] for sentence in layers.cycles(circle)] == names


def test_an_impure_planner_is_found() -> None:
    broken = package(planners__pooling="import json\nimport asyncio")
    assert "carpool.planners.pooling:2 imports asyncio" in layers.impure(broken)[0]
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


def test_every_function_is_used() -> None:
    documented = (ROOT / "docs" / "library.md").read_text("utf-8")
    broken = layers.unused_functions(modules(), documented)
    assert not broken, "\n".join(broken)


def test_an_unused_function_is_found() -> None:
    engine = "class Engine:\n    def step(self): ...\n    def _walk(self): ...\n\n\ndef submit(): ...\ndef named(): ..."
    texts = {"engine": engine, "cli": "engine.step()\ngetattr(engine, 'named')", "mock": "def shown(): ..."}
    found = layers.unused_functions(package(**texts), documented="`await fleet.submit(…)`")
    assert [sentence.split(". Use")[0] for sentence in found] == ["carpool.engine:3: nothing uses _walk"]


def test_a_name_for_two_things_is_found() -> None:
    http1 = "class Line: ...\nclass _Line: ..."
    twice = package(core__model="class Line: ...", http__http1=http1, mock="class Line: ...")
    [sentence] = layers.doubled_names(twice)
    assert sentence.startswith("The class name Line stands for 2 things, in carpool.core.model, carpool.http.http1")
