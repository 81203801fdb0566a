"""Several credentials that buy with one secret: apart in everything but what the provider counts for all of them."""

from __future__ import annotations

from carpool.core.model import PoolKey, PoolView
from carpool.core.ports import BatchLimits
from carpool.engine import Keyring
from carpool.planners.policy import RoutingPolicy
from carpool.planners.pooling import plan
from carpool.planners.pressure.quota import BatchQuota

PLACE = ("anthropic", "https://api.test")
SECRET, OTHER = (("x-api-key", "sk-very-secret"),), (("x-api-key", "sk-another"),)
FORMS = [SECRET, (("authorization", "Bearer sk-very-secret"),)]
NOW = 1_800_000_000.0


def test_a_credential_tells_nothing_of_its_secret() -> None:
    ring = Keyring(b"pepper" * 6)
    assert ring.known("anthropic", "https://api.test", SECRET) is None
    assert ring.add("anthropic", "https://api.test", [SECRET])
    credential = ring.known("anthropic", "https://api.test", SECRET)
    assert credential is not None
    assert "secret" not in credential
    assert "sk-" not in credential
    assert len(credential) == 32
    assert int(credential, 16) >= 0
    assert ring.secret(credential) == SECRET
    for shown in (repr(ring), str(ring), f"{ring}"):
        assert "secret" not in shown
        assert credential not in shown


def test_equal_secrets_are_one_credential_and_the_order_of_headers_is_nothing() -> None:
    ring = Keyring(b"pepper" * 6)
    both = (("x-api-key", "a"), ("authorization", "Bearer b"))
    first = ring.name("anthropic", "https://api.test", both)
    assert ring.add("anthropic", "https://api.test", [both])
    assert not ring.add("anthropic", "https://api.test", [both[::-1]])
    assert list(ring) == [first]
    assert first in ring
    assert "another" not in ring


def test_place_provider_and_pepper_make_other_credentials() -> None:
    ring, other = Keyring(b"pepper" * 6), Keyring(b"salted" * 6)
    names = {
        ring.name("anthropic", "https://api.test", SECRET),
        ring.name("anthropic", "https://api.elsewhere", SECRET),
        ring.name("openai", "https://api.test", SECRET),
        ring.name("anthropic", "https://api.test", (("authorization", "sk-very-secret"),)),
        other.name("anthropic", "https://api.test", SECRET),
    }
    assert len(names) == 5


def test_borrowers_have_names_of_their_own_and_one_account() -> None:
    ring = Keyring(b"pepper" * 6)
    own = ring.name(*PLACE, SECRET)
    ring.add(*PLACE, [SECRET])
    [one], new = ring.add_virtual_key("u1", *PLACE, [SECRET])
    [two], _ = ring.add_virtual_key("u2", *PLACE, [SECRET])
    [apart], _ = ring.add_virtual_key("u3", *PLACE, [OTHER])
    assert new
    assert len({own, one, two, apart}) == 4
    assert ring.account(own) == ring.account(one) == ring.account(two) == own != ring.account(apart)
    assert ring.secret(one) == SECRET
    assert set(ring.sharing(one)) == {own, one, two}
    assert ring.sharing(one)[0] == one
    assert ring.sharing(apart) == [apart]
    assert ring.account("unheard of") == "unheard of"
    assert "secret" not in repr(ring)


def test_a_borrower_keeps_its_name_when_the_secret_behind_it_changes() -> None:
    ring = Keyring(b"pepper" * 6)
    before, _ = ring.add_virtual_key("u1", *PLACE, [SECRET])
    account = ring.account(before[0])
    after, new = ring.add_virtual_key("u1", *PLACE, [OTHER])
    assert (after, new) == (before, False)
    assert ring.secret(after[0]) == OTHER
    assert ring.account(after[0]) != account


def test_one_key_in_two_headers_is_one_credential_in_two_forms() -> None:
    ring = Keyring(b"pepper" * 6)
    assert ring.add(*PLACE, FORMS)
    names = [ring.name(*PLACE, form) for form in FORMS]
    assert len(set(names)) == 2  # which must not share a batch
    assert [ring.secret(name) for name in names] == FORMS
    assert [ring.credential(name) for name in names] == [names[0]] * 2
    assert [ring.account(name) for name in names] == [names[0]] * 2
    lent, _ = ring.add_virtual_key("u1", *PLACE, FORMS)
    assert len({*lent, *names}) == 4
    assert [ring.secret(name) for name in lent] == FORMS
    assert [ring.credential(name) for name in lent] == [lent[0]] * 2
    assert [ring.account(name) for name in lent] == [names[0]] * 2
    ring.add(*PLACE, [OTHER])
    assert ring.credential(ring.name(*PLACE, OTHER)) not in {*lent, *names}


def test_the_pools_of_one_account_take_turns_on_its_road() -> None:
    road = BatchQuota.new(50, 2, NOW)
    tokens = 0
    while road.can_create(NOW):
        road, tokens = road.spend_create(NOW), tokens + 1
    views = [
        PoolView(number, PoolKey("a", "a", f"c{number}", "/", (), "", "s", "p"), 1, 9, NOW - 9, NOW, None)
        for number in range(1, 20)
    ]
    limits = BatchLimits(100_000, 256_000_000, 86_400, 86_400)
    accounts = {view.key.credential: "shared" for view in views}
    roads = {"shared": BatchQuota.new(50, 2, NOW)}
    made = plan(views, roads, RoutingPolicy(), limits, {}, NOW, overhead=1, accounts=accounts)
    assert len(made.flushes) == tokens < len(views)
    taken = {"shared": frozenset({1})}  # one of them has a create of one call whose fate is unknown
    assert not plan(views, roads, RoutingPolicy(), limits, taken, NOW, overhead=1, accounts=accounts).flushes
