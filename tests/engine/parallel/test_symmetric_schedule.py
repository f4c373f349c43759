"""All ranks' steps in any order: right data, no slot overwritten too early, no deadlock."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.symmetric_schedule import (
    FIRST_TRANSFER,
    BufferPlan,
    Kind,
    Schedule,
    Signal,
    Step,
)

Place = tuple[int, str, int, int]
"""Rank whose buffer it is, kind of slot, slot, place within the slot."""
Change = Callable[[Step], Iterable[Step]]


class BrokenError(AssertionError):
    """Data was overwritten, or everything waits."""


@dataclass
class Work:
    """A step in a queue, with the collective that it belongs to."""

    rank: int
    kind: str
    number: int
    step: Step
    slot: int
    begun: bool = False

    def places(self, size: int) -> tuple[list[Place], list[Place]]:
        """What it reads, and what it writes."""
        own = self.rank
        match self.step.kind:
            case Kind.FILL:
                return [], [(own, "gather", self.slot, 0)]
            case Kind.PULL:
                return [(self.step.peers[0], "gather", self.slot, 0)], []
            case Kind.PUSH:
                return [], [(self.step.peers[0], "reduce", self.slot, own)]
            case Kind.SUM:
                places = [(own, "reduce", self.slot, rank) for rank in range(size) if rank != own]
                return places, []
        return [], []


@dataclass
class Machine:
    """Ranks with hardware queues, counters and slots; steps begin and end in random order."""

    size: int
    counters: dict[tuple[int, int, int], int] = field(default_factory=dict)
    content: dict[Place, int] = field(default_factory=dict)
    readers: dict[Place, int] = field(default_factory=dict)
    writers: dict[Place, int] = field(default_factory=dict)

    def is_ready(self, work: Work) -> bool:
        """Whether the work may begin or, begun, end."""
        step = work.step
        return step.kind is not Kind.WAIT or all(
            self.counters.get((work.rank, step.channel, peer), 0) >= step.generation
            for peer in step.peers
        )

    def advance(self, work: Work) -> bool:
        """Begin or end the work; returns whether it ended."""
        if work.step.kind is Kind.PUT:
            for peer in work.step.peers:
                counter = (peer, work.step.channel, work.rank)
                if self.counters.get(counter, 0) != work.step.generation - 1:
                    raise BrokenError(f"a signal was lost: {work}")
                self.counters[counter] = work.step.generation
            return True
        if work.step.kind is Kind.WAIT:
            return True
        reads, writes = work.places(self.size)
        change = -1 if work.begun else 1
        for place in reads:
            self.readers[place] = self.readers.get(place, 0) + change
            if self.writers.get(place) or self.content.get(place) != work.number:
                raise BrokenError(f"{work} finds {self.content.get(place)} at {place}")
        for place in writes:
            self.writers[place] = self.writers.get(place, 0) + change
            if self.readers.get(place) or self.writers[place] > 1:
                raise BrokenError(f"{work} writes {place} while it is in use")
            self.content[place] = work.number
        work.begun = not work.begun
        return not work.begun


def play(
    schedules: list[Schedule],
    kinds: list[str],
    queue_of: list[int],
    draw: random.Random,
    change: Change = lambda step: [step],
) -> None:
    """Run all ranks' steps; streams share queues as `queue_of` says; hosts launch in bursts."""
    machine = Machine(len(schedules))
    todo = [list(_launches(schedule, kinds, change)) for schedule in schedules]
    queues: list[dict[int, deque[Work]]] = [
        {queue: deque() for queue in set(queue_of)} for _ in schedules
    ]
    while any(todo) or any(queue for rank in queues for queue in rank.values()):
        launches = [rank for rank, steps in enumerate(todo) if steps]
        heads = [
            queue
            for rank in queues
            for queue in rank.values()
            if queue and (machine.is_ready(queue[0]) or queue[0].begun)
        ]
        if not launches and not heads:
            raise BrokenError("everything waits")
        if launches and (not heads or draw.random() < 0.4):
            rank = draw.choice(launches)
            for _ in range(min(draw.randint(1, 30), len(todo[rank]))):
                work = todo[rank].pop(0)
                queues[rank][queue_of[work.step.stream]].append(work)
        else:
            queue = draw.choice(heads)
            if machine.advance(queue[0]):
                queue.popleft()


def _launches(schedule: Schedule, kinds: list[str], change: Change) -> Iterator[Work]:
    numbers = {"gather": 0, "reduce": 0}
    for kind in kinds:
        number = numbers[kind]
        numbers[kind] += 1
        steps = schedule.all_gather(number) if kind == "gather" else schedule.reduce_scatter(number)
        for step in steps:
            for changed in change(step):
                yield Work(schedule.rank, kind, number, changed, schedule.slot(number))


def schedules_of(size: int, num_slots: int, num_transfers: int) -> list[Schedule]:
    return [
        Schedule(rank=rank, size=size, num_slots=num_slots, num_transfers=num_transfers)
        for rank in range(size)
    ]


@given(
    shape=st.tuples(st.integers(2, 5), st.integers(1, 3), st.integers(1, 4)),
    kinds=st.lists(st.sampled_from(["gather", "reduce"]), min_size=1, max_size=12),
    num_queues=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_any_order_is_right(
    shape: tuple[int, int, int], kinds: list[str], num_queues: int, seed: int
) -> None:
    draw = random.Random(seed)
    size, num_slots, num_transfers = shape
    queue_of = [draw.randrange(num_queues) for _ in range(FIRST_TRANSFER + num_transfers)]
    play(schedules_of(size, num_slots, num_transfers), kinds, queue_of, draw)


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize("num_slots", [1, 2])
def test_every_wait_is_needed(signal: Signal, num_slots: int) -> None:
    """Without the waits for any one of the signals some order goes wrong."""

    def drop(step: Step) -> list[Step]:
        is_dropped = step.kind is Kind.WAIT and step.channel // num_slots == signal
        return [] if is_dropped else [step]

    def attempts() -> Iterator[None]:
        for seed in range(200):
            queue_of = list(range(FIRST_TRANSFER + 2))
            kinds = ["gather", "reduce"] * 6
            play(schedules_of(3, num_slots, 2), kinds, queue_of, random.Random(seed), drop)
            yield

    with pytest.raises(BrokenError):
        list(attempts())


def test_a_put_before_its_write_is_found() -> None:
    """The machine sees data that arrives after its signal."""

    def early(step: Step) -> list[Step]:
        if step.kind is Kind.PUSH:
            put = Step(kind=Kind.PUT, stream=step.stream, peers=step.peers, channel=2, generation=1)
            return [put, step]
        return [] if step.kind is Kind.PUT and step.channel == 2 else [step]

    def attempts() -> None:
        for seed in range(100):
            play(schedules_of(3, 1, 2), ["reduce"], [0, 1, 2, 3], random.Random(seed), early)

    with pytest.raises(BrokenError):
        attempts()


@given(size=st.integers(2, 16), rank=st.integers(0, 15), number=st.integers(0, 9))
def test_each_step_serves_another_receiver(size: int, rank: int, number: int) -> None:
    schedules = schedules_of(size, 2, 3)
    pushes = [
        [step.peers[0] for step in schedule.reduce_scatter(number) if step.kind is Kind.PUSH]
        for schedule in schedules
    ]
    assert sorted(pushes[rank % size]) == sorted(set(range(size)) - {rank % size})
    for receivers in zip(*pushes, strict=True):
        assert sorted(receivers) == list(range(size))


@given(
    size=st.integers(2, 8),
    num_slots=st.integers(1, 4),
    max_bytes=st.integers(1, 10**7),
)
def test_parts_of_the_buffer_do_not_overlap(size: int, num_slots: int, max_bytes: int) -> None:
    schedule = schedules_of(size, num_slots, 2)[0]
    plan = BufferPlan(
        size=size, num_slots=num_slots, num_channels=schedule.num_channels, max_bytes=max_bytes
    )
    counters = {
        plan.counter(channel, sender)
        for channel in range(schedule.num_channels)
        for sender in range(size)
    }
    assert len(counters) == schedule.num_channels * size
    assert max(counters) + 4 <= plan.counter_bytes
    parts = [(plan.reduce_slot(slot), plan.slice_bytes * (size - 1)) for slot in range(num_slots)]
    parts += [(plan.all_gather_slot(slot), plan.slice_bytes) for slot in range(num_slots)]
    end = plan.counter_bytes
    for offset, nbytes in sorted(parts):
        assert offset >= end
        assert offset % 256 == 0
        end = offset + nbytes
    assert end <= plan.nbytes
    for owner in range(size):
        senders = [rank for rank in range(size) if rank != owner]
        assert [plan.place(sender, owner) for sender in senders] == list(range(size - 1))
    channels = {step.channel for number in range(9) for step in schedule.all_gather(number)}
    assert max(channels) < schedule.num_channels
