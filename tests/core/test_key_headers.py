"""The same key in another header is the same credential; another key never is."""

import pytest

from carpool.core.keys import forms, plain, single_key
from carpool.core.model import Headers
from carpool.dialects import ANTHROPIC, OPENAI, configured_dialect

KEY = ("x-api-key", "k")
BEARER = ("authorization", "Bearer k")
AZURE = ("api-key", "k")
PAYER = ("openai-project", "p")
NAMES = ANTHROPIC.key_headers
NOBODY = ANTHROPIC.payer_headers
PAYERS = OPENAI.payer_headers


@pytest.mark.parametrize(
    ("secret", "sent"),
    [
        ((KEY,), (KEY,)),
        ((BEARER,), (BEARER,)),
        ((KEY, BEARER), (BEARER, KEY)),
        ((BEARER, KEY), (BEARER, KEY)),
        ((KEY, KEY), (KEY,)),
        ((("x-api-key", ""), BEARER), (BEARER,)),
        ((("authorization", "bearer  k "),), (BEARER,)),
    ],
)
def test_a_key_has_the_same_forms_whatever_header_it_comes_in(secret: Headers, sent: Headers) -> None:
    assert forms(secret, NAMES, NOBODY) == [(KEY,), (BEARER,), (BEARER, KEY)]
    assert plain(secret, NOBODY) == sent


@pytest.mark.parametrize(
    "secret",
    [
        (KEY, ("authorization", "Bearer another")),
        (KEY, ("x-api-key", "another")),
        (KEY, ("authorization", "Basic k")),
        (("authorization", "k"),),
        (("authorization", "Basic k"),),
        (("x-api-key", ""),),
        (("authorization", "Bearer "),),
        (),
    ],
)
def test_what_is_not_one_key_has_no_other_form(secret: Headers) -> None:
    assert forms(secret, NAMES, NOBODY) == [secret] == [plain(secret, NOBODY)]
    assert single_key(secret) is None


def test_who_pays_stays_beside_the_key() -> None:
    azure = configured_dialect("openai", "https://x.openai.azure.com/openai/v1").key_headers
    assert forms((PAYER, BEARER), OPENAI.key_headers, PAYERS) == [(BEARER, PAYER)] == [plain((PAYER, BEARER), PAYERS)]
    assert forms((AZURE, PAYER), OPENAI.key_headers, PAYERS) == [(BEARER, PAYER), (AZURE, PAYER)]
    assert forms((BEARER, PAYER), azure, PAYERS) == [(AZURE, PAYER), (BEARER, PAYER), (AZURE, BEARER, PAYER)]


def test_different_keys_share_no_form() -> None:
    other: Headers = (("x-api-key", "Bearer k"),)
    assert not set(forms((KEY,), NAMES, NOBODY)) & set(forms(other, NAMES, NOBODY))
    assert not set(forms((KEY,), NAMES, NOBODY)) & set(forms((("x-api-key", "k2"),), NAMES, NOBODY))


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2023-06-01", "x-api-key"),
        ("2026-10-21", "authorization"),
        ("2027-01-01", "authorization"),
        (None, "x-api-key"),
    ],
)
def test_a_lent_key_goes_where_the_sdks_of_that_version_send_it(version: str | None, expected: str) -> None:
    headers: Headers = () if version is None else (("anthropic-version", version),)
    assert ANTHROPIC.key_header(headers) == expected
    assert OPENAI.key_header(headers) == "authorization"
