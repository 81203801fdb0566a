"""The code under the rules, parsed once."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.support import ROOT

SOURCE = ROOT / "src" / "carpool"
MADE = {".git", ".venv", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__", "node_modules"}
_DOTTED = re.compile(r"carpool(\.\w+)+(?=$|:)")


@dataclass(frozen=True)
class Import:
    """One imported thing. `module` is surely a module; `target` may be one, or a name inside it."""

    module: str
    target: str
    line: int

    def reached(self, names: set[str]) -> str:
        """The module it reaches: `from carpool import errors` reaches `carpool.errors`."""
        return self.target if self.target in names else self.module


@dataclass(frozen=True)
class Module:
    name: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def component(self) -> str:
        """The part of carpool that it belongs to: `carpool.engine.context` is of `engine`."""
        return component(self.name)

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports())

    def _imports(self) -> Iterator[Import]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                yield from (Import(base, f"{base}.{alias.name}", node.lineno) for alias in node.names)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        package = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*package, *([node.module] if node.module else [])])

    @cached_property
    def mentions(self) -> set[str]:
        """Modules named in strings, as for `import_module` or a server's `module:app`."""
        texts = (node.value for node in ast.walk(self.tree) if isinstance(node, ast.Constant))
        return {found[0] for text in texts if isinstance(text, str) and (found := _DOTTED.match(text))}


def component(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


@cache
def modules() -> tuple[Module, ...]:
    return tuple(_module(path) for path in sorted(SOURCE.rglob("*.py")))


def _module(path: Path) -> Module:
    parts = list(path.relative_to(SOURCE.parent).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    return Module(".".join(parts[:-1] if is_package else parts), path.read_text("utf-8"), is_package)


@cache
def tracked() -> tuple[Path, ...]:
    """Every file that is or would be committed; without git, every file that does not look made."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        found = sorted(path for path in ROOT.rglob("*") if path.is_file())
        return tuple(path for path in found if not MADE & set(path.relative_to(ROOT).parts))
    return tuple(ROOT / name for name in listed if name and (ROOT / name).is_file())
