"""Several credentials that buy with one secret: apart in everything but what the provider counts for all of them."""

from __future__ import annotations

from carpool.budget import Road
from carpool.engine import Keyring
from carpool.model import PoolKey, PoolView
from carpool.policy import RoutingPolicy
from carpool.pooling import plan
from carpool.ports import Limits

PLACE = ("anthropic", "https://api.test")
SECRET, OTHER = (("x-api-key", "sk-very-secret"),), (("x-api-key", "sk-another"),)
NOW = 1_800_000_000.0


def test_borrowers_have_names_of_their_own_and_one_account() -> None:
    ring = Keyring(b"pepper" * 6)
    own, _ = ring.add(*PLACE, SECRET)
    one, new = ring.lend("u1", *PLACE, SECRET)
    two, _ = ring.lend("u2", *PLACE, SECRET)
    apart, _ = ring.lend("u3", *PLACE, OTHER)
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
    before, _ = ring.lend("u1", *PLACE, SECRET)
    account = ring.account(before)
    after, new = ring.lend("u1", *PLACE, OTHER)
    assert (after, new) == (before, False)
    assert ring.secret(after) == OTHER
    assert ring.account(after) != account
    bearer, _ = ring.lend("u1", *PLACE, (("authorization", "Bearer sk-another"),))
    assert bearer != before  # another form, which must not share a batch with the first


def test_the_pools_of_one_account_take_turns_on_its_road() -> None:
    road = Road.new(50, 2, NOW)
    tokens = 0
    while road.can_create(NOW):
        road, tokens = road.spend_create(NOW), tokens + 1
    views = [
        PoolView(number, PoolKey("a", "a", f"c{number}", "/", (), "", "s", "p"), 1, 9, NOW - 9, NOW, None)
        for number in range(1, 20)
    ]
    limits = Limits(100_000, 256_000_000, 86_400, 86_400)
    accounts = {view.key.credential: "shared" for view in views}
    roads = {"shared": Road.new(50, 2, NOW)}
    made = plan(views, roads, RoutingPolicy(), limits, {}, NOW, overhead=1, accounts=accounts)
    assert len(made.flushes) == tokens < len(views)
    taken = {"shared": frozenset({1})}  # one of them has a create of one call whose fate is unknown
    assert not plan(views, roads, RoutingPolicy(), limits, taken, NOW, overhead=1, accounts=accounts).flushes
