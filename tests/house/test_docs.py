"""Docs that can fail: what is public is documented, what is drawn is fresh, what is linked is there."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from carpool.core import lifecycle, model
from carpool.frontends.proxy import log
from carpool.planners import policy

from .sources import ROOT, Module, modules

DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([^)#]+)(?:#[^)]*)?\)")

pages = pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def unquoted(names: set[str], text: str) -> set[str]:
    """Those of the names that the text nowhere shows as code."""
    return names - set(re.findall(r"`(\w+)", text))


# ---------------------------------------------------------------- generated parts


def load_draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_draw", DOCS / "draw.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES if page.parent == DOCS])
def test_drawn_parts_are_fresh(page: Path) -> None:
    text = page.read_text("utf-8")
    assert load_draw().redraw(text) == text, f"docs/{page.name} is stale: run `make docs`."


def test_every_part_is_drawn_somewhere() -> None:
    drawn = {part for page in PAGES for part in re.findall(r"<!-- drawn: (\w+) -->", page.read_text("utf-8"))}
    assert drawn == set(load_draw().PARTS)


def test_a_stale_part_is_redrawn() -> None:
    stale = "a\n<!-- drawn: tickets -->\nold\n<!-- end of tickets -->\nb"
    fresh = load_draw().redraw(stale)
    assert load_draw().diagram(lifecycle.TICKET_MOVES) in fresh
    assert "old" not in fresh
    assert fresh.startswith("a\n")
    assert fresh.endswith("\nb")


@pytest.mark.parametrize("moves", [lifecycle.TICKET_MOVES, lifecycle.BATCH_MOVES])
def test_a_diagram_says_what_the_table_says(moves: Mapping[str, frozenset[str]]) -> None:
    fence, head, *lines, end = load_draw().diagram(moves).splitlines()
    drawn = {tuple(line.strip().split(" --> ")) for line in lines}
    told = {(str(source), str(target)) for source, targets in moves.items() for target in targets or ["[*]"]}
    assert (fence, head, end) == ("```mermaid", "stateDiagram-v2", "```")
    assert drawn == told | {("[*]", str(next(iter(moves))))}
    assert len(lines) == len(drawn)


# ---------------------------------------------------------------- words


def glossary_words(text: str) -> set[str]:
    return {word.strip("` ") for word in re.findall(r"^\| *([^|]+?) *\|", text, re.MULTILINE)}


def public_words() -> set[str]:
    classes = {one for one in vars(model).values() if isinstance(one, type) and one.__module__ == model.__name__}
    kinds = [lifecycle.TicketState, lifecycle.BatchState, model.Lane, model.OutcomeKind, model.EntryKind]
    return {one.__name__ for one in classes if not one.__name__.startswith("_")} | {
        str(state) for kind in kinds for state in kind
    }


def test_every_word_is_in_the_glossary() -> None:
    missing = public_words() - glossary_words(read("docs/glossary.md"))
    assert not missing, f"docs/glossary.md does not explain {', '.join(sorted(missing))}."


def test_a_word_counts_only_where_it_is_explained() -> None:
    assert glossary_words("| Call | one request |\n| `now` | full price |\n\nA Ticket.") == {"Call", "now"}


# ---------------------------------------------------------------- the public surface


def exported(module: Module) -> set[str]:
    for node in module.tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return set(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return set()


def public_names() -> set[str]:
    return exported(next(module for module in modules() if module.name == "carpool"))


def class_fields(module: str, name: str) -> set[str]:
    """The annotated fields and the properties of a class, read without importing it."""
    found = set()
    for node in next(one for one in modules() if one.name == module).tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            found |= {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}  # type: ignore[union-attr]
            found |= {one.name for one in node.body if isinstance(one, ast.FunctionDef) and one.decorator_list}
    return found


def test_every_public_name_is_documented() -> None:
    assert public_names(), "carpool/__init__.py has no `__all__`: say there what is public."
    missing = unquoted(public_names() - {"__version__"}, read("docs/library.md"))
    assert not missing, f"docs/library.md does not mention {', '.join(sorted(missing))}."


def test_every_counter_is_documented() -> None:
    missing = unquoted(class_fields("carpool.engine.events", "Stats"), read("docs/library.md"))
    assert not missing, f"docs/library.md does not explain the counters {', '.join(sorted(missing))}."


def test_every_event_is_documented() -> None:
    events = next(module for module in modules() if module.name == "carpool.engine.events")
    classes = [node for node in events.tree.body if isinstance(node, ast.ClassDef)]
    told = {"Event"} | {node.name for node in classes if any(ast.unparse(base) == "Event" for base in node.bases)}
    assert len(told) > 10
    missing = unquoted(told, read("docs/library.md"))
    assert not missing, f"docs/library.md does not explain the events {', '.join(sorted(missing))}."


def test_every_event_of_the_log_is_documented() -> None:
    told = {name for name, _ in (*log.DESCRIBED.values(), *log.WARNED.values())}
    told |= {"call", "log", "start", "stop", log.WAITING}
    missing = unquoted(told, read("docs/proxy.md").partition("## The log")[2])
    assert not missing, f"docs/proxy.md does not explain the events {', '.join(sorted(missing))} of the log."


def test_an_undocumented_name_is_found() -> None:
    assert unquoted({"Fleet", "Other"}, "See `Fleet(client)` and Other.") == {"Other"}
    assert exported(Module("carpool", "__all__ = ['Fleet']")) == {"Fleet"}
    assert exported(Module("carpool", "__all__: list[str] = ['Fleet']")) == {"Fleet"}


# ---------------------------------------------------------------- settings


def test_every_setting_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", read("docs/config.md"), re.MULTILINE))
    real = {one.name: "not set" if one.default is None else f"`{one.default}`" for one in fields(policy.RoutingPolicy)}
    assert rows == real


def test_every_key_of_the_file_is_documented() -> None:
    keys = {
        f"{section}.{key}"
        for section, content in policy._SECTIONS.items()
        for key, setting in (content or {}).items()
        if setting
    }
    missing = keys - set(re.findall(r"`(\w+\.\w+)`", read("docs/config.md")))
    assert not missing, f"docs/config.md does not mention {', '.join(sorted(missing))}."


# ---------------------------------------------------------------- examples, commands, links


@pages
def test_examples_compile_and_import_what_is_public(page: Path) -> None:
    for language, text in FENCE.findall(page.read_text("utf-8")):
        if language == "python":
            example = Module("example", text)
            used = {found.target for found in example.imports if found.module == "carpool"}
            missing = used - {f"carpool.{name}" for name in public_names()}
            assert not missing, f"An example in {page.name} imports what is not public: {', '.join(sorted(missing))}."


@pages
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text("utf-8"), re.MULTILINE))
    assert not named - targets, f"{page.name} names make targets that are not there: {', '.join(named - targets)}."


def test_help_lists_every_target() -> None:
    makefile = read("Makefile")
    phony = set(re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split())  # type: ignore[index]
    assert phony == set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))


@pages
def test_links_lead_somewhere(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text("utf-8")) if not (page.parent / link).exists()]
    assert not broken, f"{page.name} links to what is not there: {', '.join(broken)}."
