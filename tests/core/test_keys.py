"""Virtual keys as values: what they are called, when they are good, and how one follows another."""

from __future__ import annotations

import pytest

from carpool.core.errors import ConfigError
from carpool.core.keys import (
    SHAPE,
    KeyState,
    Profile,
    VirtualKey,
    check_free,
    digest_of,
    looks_virtual,
    new_key,
    revoked,
    rotated,
)
from carpool.core.model import Lane

PEPPER = b"a pepper of the test"
NOW = 1_800_000_000.0


def made(name: str = "ci", **more: object) -> tuple[VirtualKey, str]:
    return new_key(PEPPER, name, "anthropic", "ANTHROPIC_API_KEY", NOW, **more)  # type: ignore[arg-type]


def test_a_key_has_43_letters_nobody_can_guess_and_is_known_by_its_keyed_hash():
    one, secret = made()
    two, other = made()
    assert SHAPE.fullmatch(secret)
    assert looks_virtual(secret)
    assert secret != other
    assert one.uid != two.uid
    assert one.digest == digest_of(PEPPER, secret) != digest_of(b"another pepper", secret)
    assert secret not in repr(one)
    assert secret[4:8] == one.hint


@pytest.mark.parametrize("name", ["", "-x", "two words", "x" * 61, "a\nb", "key/1"])
def test_odd_names_are_refused(name: str):
    with pytest.raises(ConfigError, match="can't be the name of a key"):
        made(name)


def test_a_key_is_good_until_it_expires():
    key, _ = made(expires_at=NOW + 60)
    assert key.state(NOW + 59.9) is KeyState.ACTIVE
    assert key.state(NOW + 60) is KeyState.EXPIRED
    assert not key.live(NOW + 60)


def test_a_revoked_key_is_not_good_whatever_the_time():
    key, _ = made()
    [ended] = revoked([key], "ci", NOW + 5)
    assert ended.state(NOW) is ended.state(NOW + 99) is KeyState.REVOKED
    with pytest.raises(ConfigError, match="The key ci is revoked already"):
        revoked([ended], "ci", NOW + 6)


def test_a_rotated_key_stays_who_it_is():
    key, secret = made(owner="platform", profile=Profile(lanes=(Lane.NOW,), tags={"team": "ci"}))
    [ending, fresh], new = rotated([key], "ci", NOW + 10, 3600, PEPPER)
    assert new != secret
    assert fresh.digest == digest_of(PEPPER, new)
    assert (fresh.uid, fresh.name, fresh.owner, fresh.profile) == (key.uid, key.name, key.owner, key.profile)
    assert ending.digest == key.digest
    assert ending.state(NOW + 11) is KeyState.ENDING
    assert ending.state(NOW + 10 + 3600) is KeyState.ROTATED
    assert fresh.state(NOW + 11) is KeyState.ACTIVE


def test_a_second_rotation_gives_the_first_secret_no_more_time():
    key, _ = made()
    first, _ = rotated([key], "ci", NOW, 60, PEPPER)
    second, _ = rotated(first, "ci", NOW + 10, 3600, PEPPER)
    ends = {one.digest: one.ends_at for one in second}
    assert ends[key.digest] == NOW + 60
    assert sorted(end for end in ends.values() if end is not None) == [NOW + 60, NOW + 10 + 3600]


def test_to_revoke_ends_what_is_still_good_after_a_rotation():
    key, _ = made()
    both, _ = rotated([key], "ci", NOW, 3600, PEPPER)
    assert {one.state(NOW + 1) for one in revoked(both, "ci", NOW + 1)} == {KeyState.REVOKED}


def test_a_name_is_free_again_when_its_key_is_not_good_any_more():
    key, _ = made()
    with pytest.raises(ConfigError, match="carpool keys rotate ci"):
        check_free([key], "ci", NOW)
    check_free(revoked([key], "ci", NOW), "ci", NOW)
    check_free([key], "other", NOW)


def test_a_new_key_of_an_old_name_is_somebody_else():
    one, _ = made()
    two, _ = made()
    assert one.uid != two.uid
