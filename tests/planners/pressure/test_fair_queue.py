from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.planners.pressure.fair_queue import FairQueue, tag_set

NOW = 1_794_000_000.0


def call_all(line: FairQueue[str], now: float = 0.0) -> list[str]:
    called = []
    while line:
        place = line.next(now)
        line.called(place, now)
        called.append(place.item)
    return called


def test_turns_go_round_the_tag_sets_and_first_come_first_served_within_one() -> None:
    line: FairQueue[str] = FairQueue()
    for number in range(4):
        line.join(f"a{number}", tag_set({"team": "a"}), None)
    line.join("b0", tag_set({"team": "b"}), None)
    line.join("none0", tag_set(None), None)
    line.join("b1", tag_set({"team": "b"}), None)
    assert call_all(line) == ["a0", "b0", "none0", "a1", "b1", "a2", "a3"]


def test_tags_are_a_set_whatever_their_order() -> None:
    assert tag_set({"a": "1", "b": "2"}) == tag_set({"b": "2", "a": "1"})
    assert tag_set({}) == tag_set(None)


def test_a_deadline_that_presses_goes_first_and_its_tag_set_pays() -> None:
    line: FairQueue[str] = FairQueue()
    for number in range(3):
        line.join(f"a{number}", tag_set({"team": "a"}), None)
        line.join(f"b{number}", tag_set({"team": "b"}), 100.0 if number == 2 else None)
    assert call_all(line, now=99.0)[:2] == ["a0", "b0"]
    for number in range(3):
        line.join(f"a{number}", tag_set({"team": "a"}), None)
        line.join(f"b{number}", tag_set({"team": "b"}), 100.0 if number == 2 else None)
    assert call_all(line, now=100.0) == ["b2", "a0", "a1", "b0", "a2", "b1"]


def test_deadlines_take_at_most_every_other_turn() -> None:
    line: FairQueue[str] = FairQueue()
    for number in range(50):
        line.join(f"hurry{number}", tag_set({"team": "h"}), 0.0)
        line.join(f"wait{number}", tag_set({"team": "w"}), None)
    called = call_all(line, now=1.0)
    assert sum(name.startswith("wait") for name in called[:40]) >= 19


def test_who_leaves_is_not_called_and_is_forgotten() -> None:
    line: FairQueue[str] = FairQueue()
    first = line.join("stays", (), None)
    for _ in range(1000):
        line.leave(line.join("leaves", (), 5.0))
    assert len(line) == 1
    assert sum(map(len, line._queues.values())) < 100
    assert len(line._pressing) < 100
    line.leave(first)
    line.leave(first)
    assert len(line) == 0
    assert not line._queues


moves = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "call", "leave"]), st.integers(0, 4), st.one_of(st.none(), st.floats(0, 50))
    ),
    max_size=200,
)


@given(moves)
def test_everybody_who_joins_is_called_once_or_leaves(script: list[tuple[str, int, float | None]]) -> None:
    line: FairQueue[int] = FairQueue()
    waiting, called, joined, now = {}, [], 0, 0.0
    for verb, number, press_at in script:
        now += 0.5
        if verb == "join":
            waiting[joined] = line.join(joined, (("t", str(number)),), press_at)
            joined += 1
        elif waiting and verb == "leave":
            line.leave(waiting.pop(sorted(waiting)[number % len(waiting)]))
        elif waiting and verb == "call":
            place = line.next(now)
            assert line.next(now) is place
            line.called(place, now)
            del waiting[place.item]
            called.append(place.item)
        assert len(line) == len(waiting)
        assert {place.item for place in line} == set(waiting)
    called += call_all(line, now)  # type: ignore[arg-type]
    assert sorted(called) == sorted(set(called))
    assert len(line) == 0


@given(st.lists(st.integers(2, 40), min_size=3, max_size=6), st.integers(0, 1))
def test_tag_sets_without_deadlines_share_alike_and_have_half_of_all_turns(counts: list[int], hurried: int) -> None:
    line: FairQueue[str] = FairQueue()
    for tag, count in enumerate(counts):
        for _ in range(count):
            line.join(str(tag), tag_set({"t": str(tag)}), 0.0 if tag < hurried else None)
    called = call_all(line, now=1.0)[: min(counts) * len(counts)]
    shares = [called.count(str(tag)) for tag in range(hurried, len(counts))]
    assert max(shares) - min(shares) <= 1
    assert sum(shares) >= len(called) // 2
