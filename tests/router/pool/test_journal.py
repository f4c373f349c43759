"""What the router remembers of its pool: events and lost workers."""

from __future__ import annotations

from dataclasses import replace

from router.pool.journal import LOST_S, MAX_EVENTS, TOGETHER_S, EventKind, PoolJournal
from router.pool.members import (
    Departure,
    DepartureReason,
    Member,
    WorkerKey,
    departure_from_proto,
    departure_to_proto,
)
from router.pool.registry import Registry
from router.pool.view import PoolView
from tests.router.routing.pools import Clock, decode, prefill


def told(journal: PoolJournal) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(event.kind.value, event.instance, event.ranks) for event in journal.events()]


def rank_of(member: Member, rank: int) -> Member:
    return replace(member, key=member.key._replace(rank=rank))


def test_a_worker_that_joins_drains_and_leaves_is_told_so() -> None:
    journal = PoolJournal(Clock())
    journal.observe([decode(0)], [])
    journal.observe([decode(0, draining=True)], [])
    journal.observe([], [Departure(1, decode(0).key, DepartureReason.LEFT)])
    assert told(journal) == [
        ("joined", "decode-0", (0,)),
        ("draining", "decode-0", (0,)),
        ("left", "decode-0", (0,)),
    ]
    assert journal.lost() == []


def test_a_lost_worker_is_kept_until_its_place_is_taken_again() -> None:
    clock = Clock()
    journal = PoolJournal(clock)
    journal.observe([decode(0), decode(1)], [])
    gone = [Departure(n + 1, decode(n).key, DepartureReason.LOST) for n in range(2)]
    journal.observe([], gone)
    assert [lost.member.key for lost in journal.lost()] == [decode(0).key, decode(1).key]
    journal.observe([decode(0, key=WorkerKey("decode-0", 2, 0))], gone)
    assert [lost.member.key for lost in journal.lost()] == [decode(1).key]
    clock.now += LOST_S + 1
    assert journal.lost() == []


def test_a_later_life_is_a_restart_and_no_loss() -> None:
    journal = PoolJournal(Clock())
    journal.observe([decode(0)], [])
    reborn = decode(0, key=WorkerKey("decode-0", 2, 0))
    journal.observe([reborn], [Departure(1, decode(0).key, DepartureReason.REPLACED)])
    kinds = [event.kind for event in journal.events()]
    assert kinds == [EventKind.JOINED, EventKind.RESTARTED, EventKind.JOINED]
    assert journal.lost() == []


def test_ranks_that_do_the_same_together_are_one_event_and_later_another() -> None:
    clock = Clock()
    journal = PoolJournal(clock)
    ranks = [rank_of(decode(0), rank) for rank in range(4)]
    other = prefill(0)
    journal.observe(ranks[:1], [])
    journal.observe([*ranks[:1], other], [])
    journal.observe([*ranks[:3], other], [])
    assert told(journal) == [("joined", "decode-0", (0, 1, 2)), ("joined", "prefill-0", (0,))]
    clock.now += TOGETHER_S + 1
    journal.observe([*ranks, other], [])
    assert told(journal)[-1] == ("joined", "decode-0", (3,))


def test_events_are_bounded() -> None:
    clock = Clock()
    journal = PoolJournal(clock)
    for _ in range(MAX_EVENTS):
        clock.now += TOGETHER_S + 1
        journal.observe([decode(0)], [])
        journal.observe([], [])
    assert len(journal.events()) == MAX_EVENTS


def test_a_failure_that_the_view_notes_is_an_event_with_its_reason() -> None:
    pool, journal = PoolView(Clock()), PoolJournal(Clock())
    pool.on_failure(journal.note_failure)
    pool.update([decode(0)])
    journal.observe(pool.members(), [])
    pool.mark_failed(decode(0).key, "the connection broke")
    pool.mark_failed(decode(7).key, "nobody knows it")
    assert [(e.kind.value, e.text) for e in journal.events()][1:] == [
        ("failing", "the connection broke")
    ]


def test_the_registry_says_why_each_worker_went() -> None:
    clock = Clock()
    registry = Registry(["m"], 5.0, clock)
    lease = registry.register(decode(0))
    registry.register(decode(1))
    registry.register(decode(1, key=WorkerKey("decode-1", 2, 0)))
    registry.deregister(lease)
    for _ in range(100):
        clock.now += 0.25
        registry.tick()
    registry.expire()
    reasons = [(gone.number, str(gone.key), gone.reason.name) for gone in registry.departures()]
    assert reasons == [
        (1, "decode-1/0", "REPLACED"),
        (2, "decode-0/0", "LEFT"),
        (3, "decode-1/0", "LOST"),
    ]
    for gone in registry.departures():
        assert departure_from_proto(departure_to_proto(gone)) == gone
