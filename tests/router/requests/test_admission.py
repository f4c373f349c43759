"""The queue for places in flight: in order, bounded, and nothing is lost or given twice."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import TooManyRequestsError
from router.pool.members import member_from_proto
from router.requests.admission import SMALL_BODY_BYTES, Admission, limit_of
from router.requests.time_limits import limits_from_arrival
from runtime.config import RouterSection
from runtime.errors import DeadlineExceededError, DrainingError
from runtime.pb import common_pb2, registry_pb2
from tests.router.routing.pools import decode


@dataclass
class Caller:
    """A request that asks for places and holds them until it is told to leave."""

    number: int
    num_choices: int
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Crowd:
    """Callers of one admission, and the order in which they were let in."""

    def __init__(self, limit: int) -> None:
        self.admission = Admission(limit)
        self.callers: list[Caller] = []
        self.inside: dict[int, Caller] = {}
        self.order: list[int] = []

    def arrive(self, num_choices: int) -> Caller:
        caller = Caller(len(self.callers), num_choices)
        self.callers.append(caller)
        caller.task = asyncio.create_task(self._visit(caller))
        return caller

    async def _visit(self, caller: Caller) -> None:
        async with self.admission.admit(caller.num_choices):
            self.inside[caller.number] = caller
            self.order.append(caller.number)
            try:
                await caller.leave.wait()
            finally:
                del self.inside[caller.number]

    @property
    def waiting(self) -> list[Caller]:
        return [
            c for c in self.callers if c.task and not c.task.done() and c.number not in self.order
        ]


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(1, 5)),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("cancel and leave"), st.integers(0, 20)),
        st.tuples(st.just("limit"), st.integers(1, 6)),
    ),
    max_size=40,
)


async def play(operations: list[tuple[str, int]]) -> None:
    crowd = Crowd(3)
    admission = crowd.admission
    for kind, number in operations:
        inside, waiting = list(crowd.inside.values()), crowd.waiting
        if kind == "arrive":
            crowd.arrive(number)
        elif kind == "limit":
            admission.set_limit(number)
        if kind.endswith("leave") and inside:
            inside[number % len(inside)].leave.set()
        if kind.startswith("cancel") and waiting:
            task = waiting[number % len(waiting)].task
            assert task is not None
            task.cancel()
        await settle()
        assert crowd.order == sorted(crowd.order)  # first in, first out
        held = [caller.num_choices for caller in crowd.inside.values()]
        assert admission.num_in_flight == sum(held)  # nothing lost, nothing given twice
        assert admission.num_waiting == len(crowd.waiting)
        if crowd.waiting:  # nobody waits before a free place
            assert admission.num_in_flight >= admission.limit
    for caller in crowd.callers:
        caller.leave.set()
    await asyncio.gather(*(c.task for c in crowd.callers if c.task), return_exceptions=True)
    assert (admission.num_in_flight, admission.num_waiting) == (0, 0)


@settings(deadline=None, max_examples=60)
@given(OPERATIONS)
def test_requests_are_let_in_in_order_and_places_are_conserved(
    operations: list[tuple[str, int]],
) -> None:
    asyncio.run(play(operations))


async def test_a_place_may_be_given_back_before_the_answer_is_out() -> None:
    crowd = Crowd(1)
    async with crowd.admission.admit(3) as place:
        second = crowd.arrive(1)
        await settle()
        assert crowd.waiting == [second]
        place.give_back()
        await settle()
        assert list(crowd.inside) == [0]
    assert crowd.admission.num_in_flight == 1
    second.leave.set()
    await settle()
    assert crowd.admission.num_in_flight == 0


async def test_a_place_given_in_the_moment_in_which_the_wait_ends_is_not_lost() -> None:
    crowd = Crowd(1)
    first, second, third = (crowd.arrive(1) for _ in range(3))
    await settle()
    first.leave.set()
    await asyncio.sleep(0)  # first leaves in the next turn, and lets second in
    assert second.task is not None
    second.task.cancel()
    await settle()
    assert list(crowd.inside) == [2]
    third.leave.set()
    await settle()
    assert crowd.admission.num_in_flight == 0


async def test_draining_answers_who_waits() -> None:
    crowd = Crowd(1)
    first, second = crowd.arrive(1), crowd.arrive(1)
    await settle()
    crowd.admission.drain()
    await settle()
    assert second.task is not None
    assert isinstance(second.task.exception(), DrainingError)
    with pytest.raises(DrainingError):
        async with crowd.admission.admit(1):
            pass
    first.leave.set()
    await settle()
    assert crowd.admission.num_in_flight == 0


async def test_the_wait_has_an_end() -> None:
    admission = Admission(1, queue_timeout_s=0.01)
    async with admission.admit(1):
        with pytest.raises(TooManyRequestsError, match=r"router\.queue_timeout_s"):
            async with admission.admit(1):
                pass
    assert (admission.num_in_flight, admission.num_waiting) == (0, 0)


async def test_the_time_of_a_request_runs_in_the_queue() -> None:
    admission = Admission(1)
    section = RouterSection(request_timeout_s=5.0, first_token_timeout_s=2.0)
    arrived = asyncio.get_running_loop().time() - 2.0
    async with admission.admit(1):
        with pytest.raises(DeadlineExceededError, match=r"first_token_timeout_s.*while 1 "):
            async with admission.admit(1, partial(limits_from_arrival, section, arrived)):
                pass
    assert (admission.num_in_flight, admission.num_waiting) == (0, 0)


async def test_bodies_that_wait_are_bounded_together() -> None:
    admission = Admission(1, max_queue_bytes=10 * SMALL_BODY_BYTES)
    with admission.body() as first, admission.body() as second:
        first.add(10 * SMALL_BODY_BYTES)
        second.add(SMALL_BODY_BYTES)  # small ones are read all the same
        with pytest.raises(TooManyRequestsError, match="max_queue_bytes"):
            second.add(1)
        async with admission.admit(1):
            with pytest.raises(TooManyRequestsError, match="max_queue_bytes"):
                async with admission.admit(1):
                    pass
            first.release()
            assert admission.body_bytes == SMALL_BODY_BYTES + 1
    assert admission.body_bytes == 0


@pytest.mark.parametrize(
    ("ranks", "num_processes", "expected"),
    [([128], 1, 96), ([128, 40], 2, 63), ([0], 1, 96), ([1], 8, 1), ([], 1, 0)],
)
def test_what_decode_takes_on_is_shared_by_processes(
    ranks: list[int], num_processes: int, expected: int
) -> None:
    members = [
        member_from_proto(
            registry_pb2.WorkerRecord(
                identity=common_pb2.WorkerIdentity(instance=f"decode-{index}", epoch=1),
                role=common_pb2.ROLE_DECODE,
                address="127.0.0.1:1",
                max_num_requests=num_requests,
            )
        )
        for index, num_requests in enumerate(ranks)
    ]
    assert limit_of(members, num_processes) == expected


def test_what_decode_takes_on_is_shared_by_routers() -> None:
    ranks = [decode(0, max_num_requests=40, num_routers=2), decode(1, max_num_requests=40)]
    assert limit_of(ranks[:1], 1) == 15
    assert limit_of(ranks, 1) == 45, "the second one is not at the other router yet"
    assert limit_of(ranks[:1], 3) == 5
