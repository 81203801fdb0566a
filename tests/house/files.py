"""The rules for every committed file. What they look for is spelt in pieces, so that they don't find themselves."""

from __future__ import annotations

import re

HOSTS = re.compile("|".join(re.escape(".".join(host)) for host in (
    ("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("npmjs", "com"), ("deb", "debian", "org"),
    ("security", "debian", "org"), ("archive", "ubuntu", "com"), ("crates", "io"), ("proxy", "golang", "org"),
)), re.IGNORECASE)  # fmt: skip
MACHINE_PATH = re.compile(r"(?<![\w.})/~$-])/(?:work|root|home|Users)/\w")
LEFTOVER = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|HA" + r"CK)\b")
LOCKS = {"uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "package-lock.json", "yarn.lock", "pnpm-lock.yaml"}


def package_hosts(name: str, text: str) -> list[str]:
    return _report(name, text, HOSTS, "names a package host: every machine has its own")


def machine_paths(name: str, text: str) -> list[str]:
    return _report(name, text, MACHINE_PATH, "names a path of one machine: derive it instead")


def leftovers(name: str, text: str) -> list[str]:
    return _report(name, text, LEFTOVER, "has a note to self: do it, or say it in an issue")


def lock_file(name: str) -> list[str]:
    return [f"{name} is a lock file: leave it out."] if name.rpartition("/")[2] in LOCKS else []


def _report(name: str, text: str, pattern: re.Pattern[str], trouble: str) -> list[str]:
    return [f"{name}:{text.count(chr(10), 0, found.start()) + 1} {trouble}." for found in pattern.finditer(text)]
