from __future__ import annotations

from collections.abc import Callable

import pytest

from . import files
from .sources import ROOT, tracked


def texts() -> dict[str, str]:
    found = {}
    for path in tracked():
        data = path.read_bytes()
        if b"\0" not in data:
            found[path.relative_to(ROOT).as_posix()] = data.decode("utf-8", "replace")
    return found


@pytest.mark.parametrize("checker", [files.package_hosts, files.machine_paths, files.leftovers])
def test_committed_files(checker: Callable[[str, str], list[str]]) -> None:
    broken = [sentence for name, text in texts().items() for sentence in checker(name, text)]
    assert not broken, "\n".join(broken)


def test_no_lock_files() -> None:
    broken = [sentence for name in texts() for sentence in files.lock_file(name)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("checker", "bad"),
    [
        (files.package_hosts, "index = https://" + "pypi" + ".org/simple"),
        (files.package_hosts, "files.python" + "hosted.org"),
        (files.machine_paths, "see /" + "home/anna/project"),
        (files.machine_paths, '"/' + 'work/x"'),
        (files.leftovers, "# TO" + "DO: later"),
    ],
)
def test_a_bad_file_is_found(checker: Callable[[str, str], list[str]], bad: str) -> None:
    assert checker("some/file.md", f"fine\n{bad}\n")[0].startswith("some/file.md:2 ")


@pytest.mark.parametrize(
    ("checker", "good"),
    [
        (files.package_hosts, "pip install carpool"),
        (files.machine_paths, "GET /v1/work/items, ~/work/x, $HOME/home/x, a path/root/x"),
        (files.leftovers, "a mastodon"),
    ],
)
def test_a_good_file_is_left_alone(checker: Callable[[str, str], list[str]], good: str) -> None:
    assert checker("some/file.md", good) == []


def test_a_lock_file_is_found() -> None:
    assert files.lock_file("deep/uv.lock")
    assert not files.lock_file("src/carpool/locks.py")
