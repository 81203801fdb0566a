"""Bodies of any shape: what a client wrote is what the provider reads, on every lane, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.errors import BadCall
from carpool.core.model import custom_id
from carpool.core.ports import Parsed, RawRequest
from carpool.dialects import ANTHROPIC
from tests.support.dialect_cases import canonical
from tests.support.hypothesis_settings import STEADY

REQUIRED = {"model": '"claude-opus-5"', "max_tokens": "64", "messages": "[]"}
GAPS = st.sampled_from(["", " ", "\n", "\t \r\n", "      "])


def parse(body: bytes) -> Parsed:
    headers = (("anthropic-version", "2026-10-21"), ("x-api-key", "k"))
    return ANTHROPIC.parse(RawRequest("POST", "/v1/messages", "", headers, body))


# ---------------------------------------------------------------- JSON as text, so that every way to write it occurs


def escaped(text: str, style: int) -> str:
    """A JSON string, some or all of its characters as \\u escapes."""
    if style == 0:
        return json.dumps(text, ensure_ascii=False)
    if style == 1:
        return json.dumps(text)
    units = text.encode("utf-16-be")
    return '"' + "".join(f"\\u{units[i]:02x}{units[i + 1]:02X}" for i in range(0, len(units), 2)) + '"'


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
STRINGS = st.builds(escaped, TEXTS, st.integers(0, 2))
NUMBERS = st.one_of(
    st.integers(-(10**40), 10**40).map(str),
    st.sampled_from(["0", "-0", "1.0", "1e5", "1E+05", "-1.50", "0.1e-7", "18446744073709551616", "1" + "0" * 400]),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
)
SCALARS = st.one_of(STRINGS, NUMBERS, st.sampled_from(["true", "false", "null"]))


def inside(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    members = st.tuples(STRINGS, inner).map(lambda pair: f"{pair[0]} : {pair[1]}")
    return st.one_of(
        st.builds(lambda items, gap: f"[{gap}{f',{gap}'.join(items)}{gap}]", st.lists(inner, max_size=3), GAPS),
        st.builds(lambda items, gap: f"{{{gap}{f'{gap},'.join(items)}{gap}}}", st.lists(members, max_size=3), GAPS),
    )


VALUES = st.recursive(SCALARS, inside, max_leaves=10)
DEEP = st.builds(lambda depth, leaf: "[" * depth + leaf + "]" * depth, st.integers(1, 300), SCALARS)
NAMES = TEXTS.filter(lambda name: name not in (*REQUIRED, "stream"))


@st.composite
def members(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Names and values of a sound request in any order, `stream` somewhere among them or nowhere."""
    extra = draw(st.dictionaries(NAMES, VALUES | DEEP, max_size=4))
    stream = draw(st.sampled_from([{}, {"stream": "true"}, {"stream": "false"}, {"stream": "null"}]))
    return draw(st.permutations([*REQUIRED.items(), *extra.items(), *stream.items()]))


def written(pairs: list[tuple[str, str]], gap: str, style: int) -> bytes:
    told = [f"{gap}{escaped(name, style)}{gap}:{gap}{value}{gap}" for name, value in pairs]
    return f"{gap}{{{','.join(told)}}}{gap}".encode()


def strictly(text: bytes | str) -> Any:
    """Decoded without losing how a number was written, or a name that came twice."""
    return json.loads(text, parse_int=lambda n: ("n", n), parse_float=lambda n: ("n", n), object_pairs_hook=list)


@settings(STEADY, max_examples=200)
@given(members(), GAPS, st.integers(0, 2))
def test_a_body_is_what_it_was_but_for_stream(pairs: list[tuple[str, str]], gap: str, style: int) -> None:
    body = written(pairs, gap, style)
    parsed = parse(body)
    kept = [(name, value) for name, value in pairs if name != "stream"]
    assert strictly(parsed.body) == strictly(written(kept, gap, style))
    assert parsed.stream is (dict(pairs).get("stream") == "true")
    again = parse(parsed.body)
    assert (again.body, canonical(again), again.stream) == (parsed.body, canonical(parsed), False)


@settings(STEADY, max_examples=120)
@given(members(), GAPS, st.integers(0, 2))
def test_a_line_of_a_batch_carries_the_same_call(pairs: list[tuple[str, str]], gap: str, style: int) -> None:
    parsed = parse(written(pairs, gap, style))
    name = custom_id("n" * 10, 7)
    line = ANTHROPIC.line("/v1/messages", name, parsed.body)
    told = dict(strictly(line))
    assert told.keys() == {"custom_id", "params"}
    assert told["custom_id"] == name
    assert told["params"] == strictly(parsed.body)
    assert parsed.body.strip() in line


@settings(STEADY, max_examples=120)
@given(members(), st.integers(0, 2), st.data())
def test_order_and_space_make_no_other_call(pairs: list[tuple[str, str]], style: int, data: st.DataObject) -> None:
    others = data.draw(st.permutations(pairs))
    one, other = parse(written(pairs, "", style)), parse(written(others, data.draw(GAPS), data.draw(st.integers(0, 2))))
    exact = all(isinstance(json.loads(value), str | bool | None) for name, value in pairs if name not in REQUIRED)
    if exact:  # numbers that can't be decoded are compared as they are written
        assert canonical(one) == canonical(other)


@settings(STEADY, max_examples=120)
@given(members(), st.data(), GAPS)
def test_a_name_twice_is_refused(pairs: list[tuple[str, str]], data: st.DataObject, gap: str) -> None:
    """However the second is written: which of the two holds is anybody's guess."""
    name, value = data.draw(st.sampled_from(pairs))
    place = data.draw(st.integers(0, len(pairs)))
    told = [f"{gap}{escaped(one, 0)}:{gap}{worth}" for one, worth in pairs]
    told.insert(place, f"{escaped(name, data.draw(st.integers(0, 2)))}:{data.draw(st.just(value) | VALUES)}")
    with pytest.raises(BadCall):
        parse(f"{{{','.join(told)}}}".encode())
