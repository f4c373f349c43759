"""The line before the places: by tier, priority and arrival, and nobody starves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.keys.line import WaitingLine
from router.requests.pace import Pace
from runtime.tiers import Standing


@dataclass(eq=False)
class Person:
    number: int
    standing: Standing
    num_choices: int = 1


def people(*places: tuple[int, int], shares: tuple[float, ...] = ()) -> list[Person]:
    """One for each (order, priority), in the order in which they come."""
    return [
        Person(
            number,
            Standing(
                tier=f"tier-{order}",
                order=order,
                priority=priority,
                share=shares[order] if shares else 0.0,
            ),
        )
        for number, (order, priority) in enumerate(places)
    ]


def line_of(crowd: list[Person]) -> WaitingLine[Person]:
    line = WaitingLine[Person]()
    for person in crowd:
        line.add(person)
    return line


def popped(line: WaitingLine[Person]) -> list[int]:
    numbers = []
    while (person := line.pop()) is not None:
        numbers.append(person.number)
    return numbers


def test_the_tier_goes_first_then_priority_then_arrival() -> None:
    crowd = people((1, 0), (0, 5), (0, 0), (1, -1), (0, 0))
    assert popped(line_of(crowd)) == [2, 4, 1, 3, 0]


def test_without_tiers_the_line_is_first_in_first_out() -> None:
    assert popped(line_of(people(*[(0, 0)] * 20))) == list(range(20))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-2, 2)), max_size=30),
    st.lists(st.integers(0, 29), max_size=30),
)
def test_who_leaves_is_never_next_and_all_others_are_once(
    places: list[tuple[int, int]], leaving: list[int]
) -> None:
    crowd = people(*places, shares=(0.2, 0.3, 0.5))
    line = line_of(crowd)
    gone = {number % len(crowd) for number in leaving} if crowd else set()
    for number in leaving if crowd else ():
        line.remove(crowd[number % len(crowd)])
    assert len(line) == len(crowd) - len(gone)
    order = popped(line)
    assert sorted(order) == [n for n in range(len(crowd)) if n not in gone]
    for tier in range(3):  # within a tier: by priority, then by arrival
        own = [crowd[n] for n in order if crowd[n].standing.order == tier]
        assert own == sorted(own, key=lambda person: (person.standing.priority, person.number))


def test_a_low_tier_advances_by_its_share() -> None:
    crowd = people(*[(0, 0)] * 100, *[(1, 0)] * 100, shares=(0.5, 0.25))
    order = popped(line_of(crowd))[:80]
    num_low = sum(number >= 100 for number in order)
    assert 18 <= num_low <= 20


def test_the_last_of_the_last_tier_makes_room() -> None:
    crowd = people((2, 0), (1, 0), (2, 0), (0, 0))
    line = line_of(crowd)
    assert line.last_behind(0) is crowd[2]
    assert line.last_behind(2) is None
    line.remove(crowd[0])
    line.remove(crowd[2])
    assert line.last_behind(0) is crowd[1]
    assert line.counts() == {"tier-1": 1, "tier-0": 1}
    assert [line.num_ahead_of(order) for order in (0, 1, 2)] == [1, 2, 2]


def test_the_pace_of_places_predicts_a_wait() -> None:
    pace = Pace()
    assert pace.wait_s(1, 10.0) is None
    pace.note(3, 10.0)
    assert pace.wait_s(1, 11.0) is None, "one release says nothing of a rate"
    for second in (12.0, 14.0):
        pace.note(1, second)
    assert pace.wait_s(1, 14.0) == pytest.approx(2.0)
    assert pace.wait_s(3, 14.0) == pytest.approx(6.0)
    assert pace.wait_s(1, 18.0) == pytest.approx(4.0), "nothing came free for a while"
