from __future__ import annotations

import re
from typing import get_args

import pytest

from carpool.core import errors
from carpool.core.errors import CarpoolError, Fault

FAMILY = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, CarpoolError)]
CODES = {  # the provider's own words, so that SDKs map them
    "api_error",
    "authentication_error",
    "conflict_error",
    "invalid_request_error",
    "not_found_error",
    "overloaded_error",
    "permission_error",
    "rate_limit_error",
    "request_too_large",
    "timeout_error",
}
BRANCH = re.compile(r"^(?P<indent>[│ ]*)[├└]── (?P<names>\w+(?: · \w+)*)(?: {2,}(?P<about>.*))?$")


def drawn_tree() -> list[tuple[str, str, str]]:
    """(error, parent, remark) for every error in the tree on top of the module."""
    path, found = ["CarpoolError"], []
    for line in (errors.__doc__ or "").splitlines():
        branch = BRANCH.match(line)
        if not branch:
            continue
        del path[len(branch["indent"]) // 4 + 1 :]
        names = branch["names"].split(" · ")
        found += [(name, path[-1], branch["about"] or "") for name in names]
        path.append(names[-1])
    return found


def make(error: type[CarpoolError], message: str) -> CarpoolError:
    return error(message, "00000000000a1") if issubclass(error, errors.CallFailed) else error(message)


def test_the_tree_on_top_is_the_real_one():
    real = {
        (one.__name__, next(b for b in one.__bases__ if issubclass(b, CarpoolError)).__name__) for one in FAMILY[1:]
    }
    drawn = [(name, parent) for name, parent, _ in drawn_tree()]
    assert FAMILY[0] is CarpoolError
    assert set(drawn) == real
    assert len(drawn) == len(real)


def test_the_tree_tells_which_builtin_an_error_also_is():
    for name, _, about in drawn_tree():
        told = re.findall(r"also an? (\w+)", about)
        real = [base.__name__ for base in getattr(errors, name).__bases__ if not issubclass(base, CarpoolError)]
        assert told == real, f"{name} is also {real or 'nothing else'}, the tree says {told or 'nothing'}."


def test_the_tree_tells_the_status_it_names():
    for name, _, about in drawn_tree():
        for status in re.findall(r"\((\d{3})\)", about):
            assert getattr(errors, name).status == int(status)


@pytest.mark.parametrize("error", FAMILY)
def test_every_error_says_whose_fault_whether_to_retry_and_which_status(error):
    assert error.fault in get_args(Fault)
    assert isinstance(error.retryable, bool)
    assert 400 <= error.status <= 599
    assert error.code in CODES


@pytest.mark.parametrize("error", FAMILY)
def test_a_callers_http_mistake_is_not_worth_a_retry(error):
    if 400 <= error.status < 500 and error.status != 429:  # which says itself that a retry helps
        assert error.fault == "caller"
        assert not error.retryable


@pytest.mark.parametrize("error", FAMILY)
def test_every_error_reads_as_its_sentence(error):
    sentence = "The port must lie between 1 and 65535."
    made = make(error, sentence)
    assert str(made) == sentence
    assert isinstance(made, Exception)


@pytest.mark.parametrize("error", [one for one in FAMILY if issubclass(one, errors.CallFailed)])
def test_a_failed_call_names_its_ticket(error):
    assert make(error, "The batch expired.").ticket == "00000000000a1"  # type: ignore[attr-defined]


def test_a_closed_dispatcher_names_the_ticket_that_it_kept():
    assert errors.Closed("The fleet is closed.").ticket is None
    assert errors.Closed("The fleet is closed.", "00000000000a1").ticket == "00000000000a1"


def test_an_unknown_outcome_is_never_mistaken_for_nothing_sent():
    assert not issubclass(errors.ConnectionBroken, errors.NotConnected)
    assert not issubclass(errors.NotConnected, errors.ConnectionBroken)
    assert issubclass(errors.TimedOut, errors.ConnectionBroken)
