"""Which part may import which. Imports for type checking and imports inside functions count like all others."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from .sources import Module, component

LAYERS: tuple[frozenset[str], ...] = (  # from the bottom to the top
    frozenset({"core", "_version"}),
    frozenset({"dialects", "stores", "http"}),
    frozenset({"planners", "config"}),
    frozenset({"engine"}),
    frozenset({"frontends"}),
    frozenset({"cli", "dashboard", "sim", "many", "__main__", ""}),  # "" is carpool/__init__.py
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

APART = {"dialects", "stores", "http"}  # know the ports, not each other
MOCK_USERS = {"mock", "cli", "sim"}
TIMELESS = {"dialects", "planners", "config"}  # get the time passed in
CLOCK = "carpool.core.clock"

PURE = ("planners", "config", "dialects", *(f"core.{name}" for name in ("lifecycle", "model", "errors", "bounded")))
FINE = {"core", "planners"}
WORLDLY = {"asyncio", "socket", "sqlite3", "subprocess", "threading", "time", "uvicorn", "uvloop"}

LONGEST_NAME = 60
ENTRIES = (
    "carpool",
    "carpool.__main__",
    "carpool.cli",
    "carpool.mock",
    "carpool.sim.__main__",
)  # the mock is imported by users' tests


def wrong_directions(modules: Sequence[Module]) -> list[str]:
    return [sentence for module in modules for sentence in _wrong_imports(module, {known.name for known in modules})]


def _wrong_imports(module: Module, names: set[str]) -> list[str]:
    if module.component not in RANK and module.component != "mock":
        return [f"{module.name} stands in no layer: add `{module.component}` to LAYERS in tests/house/layers.py."]
    wrong = []
    for found in module.imports:
        if found.target.split(".")[0] != "carpool":
            continue
        target = found.reached(names)
        reason = _forbidden(module.component, component(target))
        if target == CLOCK and module.component in TIMELESS:
            reason = f"`{module.component}` gets the time passed in"
        if reason:
            wrong.append(f"{module.name}:{found.line} imports {target}: {reason}.")
    return wrong


def _forbidden(source: str, target: str) -> str | None:
    if source == target:
        return None
    if source == "mock":
        return "the mock shares no code with what it checks"
    if target == "mock":
        return None if source in MOCK_USERS else "only the command line, the simulator and tests may use the mock"
    if target not in RANK:
        return f"`{target}` stands in no layer"
    if RANK[target] > RANK[source]:
        return f"imports point downwards, and `{target or 'carpool'}` stands above `{source}`"
    if source in APART and target in APART:
        return f"`{source}` and `{target}` stand side by side and know only the ports"
    return None


def cycles(modules: Sequence[Module]) -> list[str]:
    """Parts of one layer may use each other, but not in a circle: packages, and what stands directly in a package."""
    names = {module.name for module in modules}
    uses: dict[str, set[str]] = {}
    for module in modules:
        source = _part(module.name)
        reached = {_part(found.reached(names)) for found in module.imports if _ours(found.target)}
        uses.setdefault(source, set()).update(reached - {source})
    return [
        f"`{start or 'carpool'}` reaches itself through its imports: break the circle."
        for start in sorted(uses)
        if start in _reach(uses.get(start, ()), uses)
    ]


def _part(name: str) -> str:
    """`core.model` and `planners.access` are parts; `stores` is one part, whose modules use each other freely."""
    parts = name.split(".")[1:]
    return ".".join(parts[:2] if parts and parts[0] in FINE else parts[:1])


def _ours(target: str) -> bool:
    return target.split(".")[0] == "carpool"


def _reach(starts: Iterable[str], uses: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(starts)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += uses.get(name, ())
    return seen


def impure(modules: Sequence[Module]) -> list[str]:
    return [
        f"{module.name}:{found.line} imports {found.target}: `{module.component}` is pure, so the engine does this."
        for module in modules
        if f"{module.name}.".startswith(tuple(f"carpool.{name}." for name in PURE))
        for found in module.imports
        if found.target.split(".")[0] in WORLDLY
    ]


def dead(modules: Sequence[Module], entries: Iterable[str] = ENTRIES) -> list[str]:
    """Modules that no entry point reaches."""
    names = {module.name for module in modules}
    uses = {module.name: _used(module, names) for module in modules}
    alive = _reach([entry for entry in entries if entry in names], uses)
    return [
        f"{module.name} is dead: nothing that runs imports it. Use it or remove it."
        for module in modules
        if module.name not in alive and module.text.strip()
    ]


def _used(module: Module, names: set[str]) -> set[str]:
    reached = {found.reached(names) for found in module.imports} | module.mentions
    return {parent for name in reached & names for parent in _with_parents(name)}


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


# Called by a library that this code extends: httpx, logging, uvicorn.
OVERRIDES = {"handle_async_request", "handle_request", "formatException", "capture_signals"}
DRAWING = {"diagram"}  # used by docs/draw.py


def unused_functions(modules: Sequence[Module], documented: str = "") -> list[str]:
    """Functions that no code of the product names. Users call the methods of its public classes, which are documented;
    of the mock, whatever their tests need."""
    named = {name for module in modules for node in ast.walk(module.tree) for name in _names(node)}
    return [
        f"{module.name}:{node.lineno}: nothing uses {node.name}. Use it or remove it, with what only tests it."
        for module in modules
        if module.component != "mock"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("__")
        and not any(isinstance(decorator, ast.Call) for decorator in node.decorator_list)  # a command
        and node.name not in named | OVERRIDES | DRAWING
        and f"{node.name}(" not in documented
    ]


def _names(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (node.attr,)
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < LONGEST_NAME:
        return node.value.replace(":", ".").split(".")  # for getattr, or a server's `module:app`
    return ()


def doubled_names(modules: Sequence[Module]) -> list[str]:
    """A public class name stands for one thing. The mock has the providers' own words."""
    places: dict[str, list[str]] = {}
    for module in modules:
        if module.component != "mock":
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(module.name)
    return [
        f"The class name {name} stands for {len(found)} things, in {', '.join(found)}: give each a name of its own."
        for name, found in sorted(places.items())
        if len(found) > 1
    ]
