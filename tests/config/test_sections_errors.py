"""Every setting of the file, wrong in every way: what is refused is refused with its path, what is allowed, and what
was probably meant. Nothing is taken that would not be understood."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carpool.config import read_config
from carpool.config.sections import PROVIDER_KEYS
from carpool.core.errors import ConfigError
from carpool.planners.policy import section_keys, sections

TLS_KEYS = ("cert", "key")
ELSEWHERE = {"routing.rules", "budgets"}  # their own tests walk them
ALLOWED = re.compile(r"must be|must hold|it must|write|such as|known are|did you mean")
SECRET = "sk-ant-api03-" + "x" * 20
WRONG: tuple[Any, ...] = (
    *(-1, 0, 1.5, 10**30, True, False, "", " ", "nonsense \u2603", "x" * 5000, SECRET, "[", "\n", math.inf),
    *([], {}, [1], [[]], {"a": 1}, {1: 2}, ["nonsense \u2603"], [None]),
)


def paths() -> Iterator[tuple[str, ...]]:
    for name in sections():
        for key in section_keys(name):
            yield name, key
    for key in PROVIDER_KEYS:
        yield "providers", "openai", key
    yield "caching", "keep_alive", "max_usd_per_day"
    for key in TLS_KEYS:
        yield "server", "tls", key


EVERY = [pytest.param(path, id=".".join(path)) for path in paths() if ".".join(path) not in ELSEWHERE]


def document(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """With what else has to be there."""
    found: dict[str, Any] = {}
    here = found
    for step in path[:-1]:
        here = here.setdefault(step, {})
    if path[:2] == ("server", "tls") and len(path) == 3:
        here |= dict.fromkeys(TLS_KEYS, "some.pem")
    here[path[-1]] = value
    return found


def refusal(folder: Path, content: Any, environ: dict[str, str] | None = None) -> str | None:
    file = folder / "carpool.yaml"
    file.write_text(json.dumps(content), encoding="utf-8")
    try:
        read_config(file, environ or {})
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("path", EVERY)
def test_a_wrong_value_is_refused_with_its_path_and_what_is_allowed(path: tuple[str, ...], tmp_path: Path) -> None:
    dotted, refused = ".".join(path), 0
    for value in WRONG:
        said = refusal(tmp_path, document(path, value))
        if said is not None:
            refused += 1
            assert dotted in said, (value, said)
            assert ALLOWED.search(said), (value, said)
            assert SECRET not in said
            assert len(said) < 600
            assert said.endswith((".", "?"))
    assert refused >= 8, f"{dotted} takes almost anything."


@pytest.mark.parametrize("path", EVERY)
def test_a_variable_is_refused_by_its_own_name(path: tuple[str, ...], tmp_path: Path) -> None:
    name, refused = "CARPOOL_" + "__".join(path).upper(), 0
    others = {"CARPOOL_SERVER__TLS__CERT": "c.pem", "CARPOOL_SERVER__TLS__KEY": "k.pem"} if path[-2] == "tls" else {}
    for value in ("{a: 1}", "[[1]]", "nonsense \u2603 {", SECRET, "-1", "{"):
        said = refusal(tmp_path, {}, others | {name: value})
        if said is not None:
            refused += 1
            assert name in said, (value, said)
            assert ALLOWED.search(said), (value, said)
            assert SECRET not in said
    assert refused >= 2, f"{name} takes almost anything."


def typos(word: str) -> set[str]:
    found = {word[:-1], word + "s", word.replace("_", "-"), word.upper(), word[1:], word[:2] + word[3:]}
    return {typo for typo in found if typo and typo != word}


@pytest.mark.parametrize("path", EVERY)
def test_a_key_that_is_mistyped_is_told_from_the_one_that_was_meant(path: tuple[str, ...], tmp_path: Path) -> None:
    known = {".".join(one) for one in paths()}
    for typo in typos(path[-1]):
        wrong = (*path[:-1], typo)
        if ".".join(wrong) in known:
            continue
        said = refusal(tmp_path, document(wrong, 1))
        assert said is not None, f"{'.'.join(wrong)} is taken, and nobody knows what it is."
        assert f"{'.'.join(wrong)} is not a setting" in said
        meant = re.search(r"did you mean ([\w.-]+)\?|known are ", said)
        assert meant is not None, said
        assert meant[1] is None or meant[1] in known


@pytest.mark.parametrize("name", sections())
def test_a_section_that_is_mistyped_or_of_another_kind(name: str, tmp_path: Path) -> None:
    for typo in typos(name) - set(sections()):
        said = refusal(tmp_path, {typo: {}})
        assert said is not None
        assert f"{typo} is not a setting" in said
    for value in (5, "text", [1], True):
        said = refusal(tmp_path, {name: value})
        assert said is not None, f"{name} may be {value!r}."
        assert name in said


# ---------------------------------------------------------------- the ways in and out


@pytest.mark.parametrize(
    ("url", "more", "told"),
    [
        ("http://internal.example/v1", "", "openai.allow_http: true where the way is safe"),
        ("http://10.0.0.5/v1", "", "unencrypted"),
        ("http://169.254.169.254/v1", "allow_http: true", "openai.allow_link_local: true if it really is there"),
        ("https://169.254.169.254", "", "cloud metadata"),
        ("https://[fe80::1]/v1", "", "cloud metadata"),
        ("https://[::ffff:169.254.169.254]/v1", "", "cloud metadata"),
        ("https://[fd00:ec2::254]", "", "cloud metadata"),
        ("https://metadata.google.internal/v1", "", "cloud metadata"),
        (
            "http://127.0.0.1:8000/v1",
            "proxy: 'http://p:3128'",
            "openai.proxy is for a provider that is reached by https",
        ),
        ("https://h/v1", "proxy: 'https://p:3128'", "it must be the URL of an HTTP proxy"),
        ("https://h/v1", "proxy: 'http://me:pass@p:3128'", "server.outgoing_proxy_auth_env"),
        ("https://h/v1", "proxy: 'http://p:3128/path'", "it must be the URL of an HTTP proxy"),
    ],
)
def test_addresses_that_are_not_asked(tmp_path: Path, url: str, more: str, told: str) -> None:
    file = tmp_path / "carpool.yaml"
    file.write_text(f"providers: {{openai: {{base_url: '{url}', {more}}}}}")
    with pytest.raises(ConfigError) as caught:
        read_config(file, {})
    assert told in str(caught.value)
    assert "pass" not in str(caught.value).replace("password", "")


@pytest.mark.parametrize(
    "text",
    [
        "{base_url: 'http://10.0.0.5/v1', allow_http: true}",
        "{base_url: 'http://169.254.1.1/v1', allow_http: true, allow_link_local: true}",
        "{base_url: 'http://127.0.0.1/v1'}",
        "{base_url: 'http://localhost:1/v1'}",
        "{base_url: 'http://[::1]:1/v1'}",
        "{base_url: 'http://models.localhost/v1'}",
    ],
)
def test_addresses_that_are(tmp_path: Path, text: str) -> None:
    (tmp_path / "carpool.yaml").write_text(f"providers: {{openai: {text}}}")
    assert read_config(tmp_path / "carpool.yaml", {}).providers[0].base_url in text


def test_the_way_out_of_the_house_holds_for_those_who_go_out(tmp_path: Path) -> None:
    (tmp_path / "carpool.yaml").write_text(
        "server: {outgoing_proxy: 'http://p:3128', ca_file: house.pem}\n"
        "providers:\n"
        "  anthropic: {}\n"
        "  openai: {proxy: direct, ca_file: own.pem}\n"
        "  other: {dialect: openai, base_url: 'https://o/v1', proxy: 'http://q:1/'}\n"
        "  local: {dialect: openai, base_url: 'http://127.0.0.1:1/v1'}\n"
        "  near: {dialect: openai, base_url: 'https://localhost:1/v1'}\n"
    )
    config = read_config(tmp_path / "carpool.yaml", {})
    assert [(one.name, one.proxy, one.ca_file) for one in config.providers] == [
        ("anthropic", "http://p:3128", "house.pem"),
        ("openai", None, "own.pem"),
        ("other", "http://q:1", "house.pem"),
        ("local", None, "house.pem"),
        ("near", None, "house.pem"),
    ]
