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


COSTS = st.lists(st.integers(1, 9), min_size=1, max_size=40)


@settings(deadline=None)
@given(
    st.lists(COSTS, min_size=2, max_size=5),
    st.lists(st.integers(0, 4), max_size=20),
    st.booleans(),
)
def test_no_tenant_that_waits_gets_less_than_another_but_for_one_turn(
    costs: list[list[int]], joined_later: list[int], is_charged_after: bool
) -> None:
    """Whatever turns cost, whoever joins when, and whether the cost is known before or after."""
    line = WaitingLine[Person]()
    waiting = [
        [
            Person(cost, Standing(tenant=f"{tenant}"), 0 if is_charged_after else cost)
            for cost in own
        ]
        for tenant, own in enumerate(costs)
    ]
    late = set(joined_later) & set(range(1, len(costs)))
    for tenant in set(range(len(costs))) - late:
        for person in waiting[tenant]:
            line.add(person)
    had = dict.fromkeys(range(len(costs)), 0)
    since = {tenant: dict(had) for tenant in range(len(costs)) if tenant not in late}
    left = [len(own) for own in waiting]
    while (person := line.pop()) is not None:
        if is_charged_after:
            line.charge(person.standing.tenant, person.number)
        one = int(person.standing.tenant)
        had[one] += person.number
        left[one] -= 1
        for tenant, before in since.items():
            if left[tenant]:
                got = had[tenant] - before[tenant]
                for other in had:
                    assert had[other] - before[other] <= got + max(costs[tenant]) + max(
                        costs[other]
                    )
        since = {tenant: before for tenant, before in since.items() if left[tenant]}
        if late:
            joining = late.pop()
            for each in waiting[joining]:
                line.add(each)
            since[joining] = dict(had)
    assert left == [0] * len(costs)


def test_who_comes_alone_is_next_behind_a_crowd_of_another() -> None:
    line = WaitingLine[Person]()
    crowd = [Person(number, Standing(tenant="crowd")) for number in range(1000)]
    for person in crowd:
        line.add(person)
    for _ in range(100):
        line.pop()
    alone = Person(0, Standing(tenant="alone"))
    line.add(alone)
    line.pop()  # they have had the same
    assert alone not in list(line) or line.pop() is alone


def test_a_tenant_that_may_not_go_keeps_its_place() -> None:
    line = WaitingLine[Person]()
    crowd = [Person(number, Standing(tenant=name)) for number, name in enumerate("aab")]
    for person in crowd:
        line.add(person)
    assert line.pop(lambda tenant: tenant != "a") is crowd[2]
    assert line.pop(lambda tenant: tenant != "a") is None
    assert line.num_waiting_of("a") == 2
    assert popped(line) == [0, 1]


def test_priority_goes_before_tenants_of_one_tier_and_a_tier_before_both() -> None:
    places = (("a", 1, -2), ("a", 0, 0), ("a", 0, 0), ("b", 0, 0), ("b", 0, 1))
    crowd = [
        Person(number, Standing(tenant=tenant, order=order, priority=priority))
        for number, (tenant, order, priority) in enumerate(places)
    ]
    assert popped(line_of(crowd)) == [1, 3, 2, 4, 0]


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
