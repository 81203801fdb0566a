from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, structs

from carpool.core import model
from carpool.core.errors import BadCall
from carpool.core.model import NONCE_LETTERS, TICKET_LETTERS, Call, Usage, base32, custom_id, ticket_number, ticket_text

tickets = st.integers(0, 2**63 - 1)
nonces = st.integers(0, 32**NONCE_LETTERS - 1).map(lambda number: base32(number, NONCE_LETTERS))
VALUES = [
    one
    for one in vars(model).values()
    if isinstance(one, type)
    and one.__module__ == model.__name__
    and (dataclasses.is_dataclass(one) or issubclass(one, Struct))
]


@given(tickets)
def test_a_ticket_survives_the_way_to_text_and_back(ticket):
    text = ticket_text(ticket)
    assert len(text) == TICKET_LETTERS
    assert ticket_number(text) == ticket


@given(tickets, tickets)
def test_ticket_texts_sort_as_tickets_do(one, other):
    assert (ticket_text(one) < ticket_text(other)) == (one < other)


@given(nonces, tickets)
def test_a_custom_id_is_one_that_providers_take(nonce, ticket):
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", custom_id(nonce, ticket))


@given(nonces, tickets)
def test_a_custom_id_gives_nonce_and_ticket_back(nonce, ticket):
    found, _, text = custom_id(nonce, ticket).partition("-")
    assert (found, ticket_number(text)) == (nonce, ticket)


def test_the_letters_have_no_look_alikes():
    letters = {base32(number, 1) for number in range(32)}
    assert len(letters) == 32
    assert not letters & set("ilou")


@pytest.mark.parametrize("text", ["", "0", "0" * 12, "0" * 14, "i" * 13, "0" * 12 + "A", "0" * 12 + "é", "٣" * 13])
def test_what_is_no_ticket_is_the_callers_mistake(text):
    with pytest.raises(BadCall, match="is not a ticket"):
        ticket_number(text)


@given(st.text(max_size=20))
def test_any_text_is_a_ticket_or_the_callers_mistake(text):
    try:
        number = ticket_number(text)
    except BadCall:
        return
    assert ticket_text(number) == text


def test_a_long_text_is_not_repeated_whole():
    with pytest.raises(BadCall) as caught:
        ticket_number("x" * 10_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", VALUES)
def test_values_are_frozen_and_have_slots(value):
    assert value.__struct_config__.frozen if issubclass(value, Struct) else value.__dataclass_params__.frozen
    assert "__slots__" in vars(value)
    assert value.__doc__
    assert not value.__doc__.startswith(f"{value.__name__}(")


def test_total_input_is_the_sum_of_the_four():
    usage = Usage(input_tokens=1, output_tokens=1000, cache_read_tokens=20, cache_write_5m_tokens=300)
    assert usage.total_input == 321
    assert structs.replace(usage, cache_write_1h_tokens=4000).total_input == 4321


def test_a_budget_runs_from_arrival_to_deadline():
    call = Call(1, "anthropic", "anthropic", "/v1/messages", b"{}", (), "hash", "claude-sonnet-5", arrived=100.0)
    assert call.budget is None
    assert structs.replace(call, deadline=160.0).budget == 60.0
