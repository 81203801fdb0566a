"""Every code block of the README and the docs runs, in the order of its page, with the newest SDKs."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool.sim.databases import database
from tests.support.deep import quick_and_deep
from tests.support.doc_blocks import PAGES, ROOT, Block, Command, blocks, commands, shows
from tests.support.doc_reader import Reader, mock_provider

RUN = [page for page in PAGES if blocks(page)]
SHOWN = frozenset({"mermaid", "text"})  # pictures, and the log: tests/house and test_log_samples look at those


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with mock_provider() as mock, database() as postgres:
        one = Reader(tmp_path_factory.mktemp("reader"), mock, postgres.empty())
        one.make_clone()
        one.script(next(block for block in blocks(ROOT / "README.md") if "pip install" in block.text))
        yield one
        one.stop()


@pytest.mark.parametrize("page", quick_and_deep(RUN, [ROOT / "README.md"]), ids=[page.name for page in RUN])
def test_the_blocks_of_a_page_run(page: Path, reader: Reader) -> None:
    reader.turn_the_page()
    for block in blocks(page):
        run(block, reader)


def run(block: Block, reader: Reader) -> None:
    if block.language in SHOWN or is_make(block) or is_real_client(block):
        return
    if served := served_elsewhere(block):
        reader.check(block, served)
    elif block.language in ("sh", "bash"):
        reader.script(block)
    elif block.language == "console":
        reader.console(block)
    elif block.language == "python":
        reader.program(block)
    elif block.language == "yaml":
        reader.config(block)
    else:
        pytest.fail(f"{block}: nobody knows how to run {block.language or 'a block without a language'}.")


def is_make(block: Block) -> bool:
    """`.ci/run` runs the targets; tests/house checks that each exists."""
    return all(line.startswith("make ") for line in block.text.splitlines())


def is_real_client(block: Block) -> bool:
    """tests/real runs Codex with this very setting."""
    codex = re.search(r"^codex exec -c (\w+)=", block.text)
    if codex is None:
        return False
    driven = "".join(path.read_text("utf-8") for path in (ROOT / "tests" / "real").glob("*.py"))
    assert f"{codex[1]}=" in driven, f"{block} gives Codex a setting that tests/real does not."
    return True


def served_elsewhere(block: Block) -> str | None:
    """The `carpool serve` of a block that needs systemd or a container engine."""
    if block.language == "ini" or block.text.startswith("docker run"):
        found = re.search(r"carpool serve .*?(?=\n|$)", block.text)
        assert found, f"{block} starts no carpool."
        return re.sub(r"--config \S+", "--config examples/company.yaml", found[0])
    return None


# ---------------------------------------------------------------- what stands within the text


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_extras_exist_and_are_installed_from_a_clone(page: Path) -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
    text = page.read_text("utf-8")
    named = {extra for found in re.findall(r"\.\[([\w,]+)\]", text) for extra in found.split(",")}
    assert named <= extras
    assert "pip install carpool" not in text.replace("'", "").replace('"', ""), "There is no such package to install."


def test_the_readme_leads_with_what_a_new_user_needs() -> None:
    """The demo and the proxy first; where batching does not pay before the first budget; where savings are shown."""
    text = (ROOT / "README.md").read_text("utf-8")
    assert re.findall(r"^## (.*)", text, re.MULTILINE)[:3] == ["Try it", "Use it as a proxy", "Use it as a library"]
    begins = [
        text.index(words) for words in ("make demo", "\ncarpool serve\n", "**Before you give a budget: when batching")
    ]
    assert begins == sorted(begins)
    assert begins[-1] < min(
        text.index(form) for form in ("x-carpool-budget", "@budget=", "--budget", "budget=", "_budget")
    )
    saved = text.index("**Where to see the savings:**")
    assert begins[-1] < saved < text.index("## Use it as a library")
    assert len(text.splitlines()) <= 140, "It is one page."


# ---------------------------------------------------------------- the reader itself


def test_a_console_block_is_read_as_commands_and_output() -> None:
    text = "$ one \\\n  more\nsaid\nagain\n$ two\n"
    assert commands(text) == [Command("one \\\n  more", ("said", "again")), Command("two", ())]


def test_output_is_compared_as_it_is_shown() -> None:
    assert shows(("rule  a", "…", "lane …"), "rule  a\nb\nc\nlane batch\n")
    assert not shows(("rule  a",), "rule  a\nand more\n")
    assert not shows(("lane now",), "lane batch\n")


def test_a_block_that_fails_is_noticed(reader: Reader) -> None:
    reader.turn_the_page()
    with pytest.raises(AssertionError, match="page:1 fails"):
        reader.script(Block("page", 1, "sh", "false\ntrue"))
    with pytest.raises(AssertionError, match="shows another output"):
        reader.console(Block("page", 1, "console", "$ echo one\ntwo\n"))
    with pytest.raises(AssertionError, match="page:1 fails"):
        reader.config(Block("page", 1, "yaml", "rooting: {}"))
