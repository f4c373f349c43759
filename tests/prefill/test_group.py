"""Data-parallel ranks as threads: they launch the same number of steps, and end together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

import pytest

from engine.memory.block_pool import BlockPool
from engine.parallel.lockstep import GroupLockstep
from kv_transfer.metadata import MetadataRecord
from prefill.kv_push import PushSettings
from prefill.loop import EngineLoop, LoopSettings
from prefill.messages import (
    AddRequest,
    CancelRequest,
    Event,
    LoopEnded,
    RankClosed,
    RequestFailed,
    RequestFinished,
    StopLoop,
)
from prefill.scheduler import Scheduler
from prefill.sender_group import SenderGroup
from runtime.errors import ErrorCode, PeerLostError, RequestCancelledError
from tests.prefill.fakes import BLOCK_SIZE, FakeRunner, FakeTicketSender, grant_all, make_item
from tests.prefill.test_ranks import Meeting, make_group
from tests.waiting import wait_until
from worker.endings import RankName

BOTH = pytest.mark.parametrize("max_ahead", [0, 1])


class PromptSender(FakeTicketSender):
    """Closes a ticket as soon as it is told to."""

    def finish(self, nonce: int, record: MetadataRecord | None) -> None:
        super().finish(nonce, record)
        self.close_all()

    def abandon(self, nonce: int) -> None:
        super().abandon(nonce)
        self.close_all()


class Rank:
    """One rank: a loop of its own on a fake model and a fake sender."""

    def __init__(self, rank: int, meeting: Meeting, *, epoch: int = 7, max_ahead: int = 0) -> None:
        self.events: list[Event] = []
        self.step_sizes: list[int] = []
        self.runner = FakeRunner(num_polls=3 * max_ahead)
        self.sender = PromptSender(lambda closure: self.loop.submit(RankClosed(0, closure)))
        self.scheduler = Scheduler(
            BlockPool(200, BLOCK_SIZE), max_num_seqs=4, max_num_batched_tokens=16
        )
        self.loop = EngineLoop(
            self.scheduler,
            self.runner,
            SenderGroup(self.sender),
            grant_all(self.events.append, lambda command: self.loop.submit(command)),
            LoopSettings(
                max_model_len=64,
                push=PushSettings(num_layers=self.runner.num_layers),
                name=RankName(instance="prefill-0", rank=rank, num_ranks=2),
                max_ahead=max_ahead,
            ),
            lockstep=GroupLockstep(make_group(rank, 2, meeting), epoch),
            observe_step=lambda num_tokens, seconds: self.step_sizes.append(num_tokens),
        )

    @property
    def num_launches(self) -> int:
        """Steps of its own and dummies."""
        return sum(not line.startswith("collect") for line in self.runner.log)

    @property
    def end(self) -> LoopEnded:
        """How the loop ended."""
        last = self.events[-1]
        assert isinstance(last, LoopEnded), last
        return last

    def count(self, event_type: type[Event]) -> int:
        return sum(isinstance(event, event_type) for event in self.events)


def make_ranks(*, epochs: tuple[int, int] = (7, 7), max_ahead: int = 0) -> tuple[Rank, Rank]:
    meeting = Meeting(2)
    first = Rank(0, meeting, epoch=epochs[0], max_ahead=max_ahead)
    return first, Rank(1, meeting, epoch=epochs[1], max_ahead=max_ahead)


def start(*ranks: Rank) -> None:
    for rank in ranks:
        rank.loop.start()


def stop(*ranks: Rank) -> None:
    for rank in ranks:
        rank.loop.submit(StopLoop())
    for rank in ranks:
        assert rank.loop.join(60)


@BOTH
def test_a_rank_without_prompts_takes_part_in_every_step(max_ahead: int) -> None:
    busy, idle = make_ranks(max_ahead=max_ahead)
    busy.loop.submit(AddRequest(make_item(1, 60)))
    start(busy, idle)
    wait_until(lambda: busy.count(RequestFinished))
    stop(busy, idle)
    assert len(busy.runner.steps) == 4
    assert idle.runner.log == ["dummy"] * 4
    if max_ahead:
        assert busy.runner.log[:3] == ["launch 0", "launch 1", "collect 0"]
    assert [busy.end.error, idle.end.error] == [None, None]


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_ranks_take_the_same_steps_whatever_comes(max_ahead: int, seed: int) -> None:
    ranks = make_ranks(max_ahead=max_ahead)
    start(*ranks)
    counts = [0, 0]
    gate = threading.Event()
    random = Random(seed)
    for nonce in range(1, 25):
        # Mostly both have prompts, sometimes one, sometimes neither.
        which = random.randrange(2)
        counts[which] += 1
        ranks[which].loop.submit(AddRequest(make_item(nonce, random.randrange(1, 60))))
        if random.random() < 0.2:
            error = RequestCancelledError("client left")
            ranks[which].loop.submit(CancelRequest(nonce, error))
        gate.wait(random.choice([0.0, 0.0, 0.004]))
    for rank, count in zip(ranks, counts, strict=True):
        wait_until(lambda rank=rank, count=count: rank.count(RequestFinished) == count)
    stop(*ranks)
    assert ranks[0].num_launches == ranks[1].num_launches > 10
    assert any("dummy" in rank.runner.log for rank in ranks)
    for rank in ranks:
        assert rank.end.error is None
        # Its own tokens, whatever the other ran in the same step.
        assert rank.step_sizes == [
            sum(end - start for _, start, end in step) for step in rank.runner.steps
        ]
        assert rank.scheduler.num_requests == 0
        assert not rank.sender.open_tickets
        rank.scheduler.check_integrity()


def test_a_rank_that_was_told_to_stop_goes_on_for_the_other() -> None:
    leaving, working = make_ranks()
    start(leaving, working)
    leaving.loop.submit(StopLoop())
    working.loop.submit(AddRequest(make_item(1, 60)))
    wait_until(lambda: working.count(RequestFinished))
    wait_until(lambda: len(leaving.runner.log) == 4)  # each on its own thread
    assert leaving.count(LoopEnded) == 0
    stop(working)
    assert leaving.loop.join(60)
    assert leaving.runner.log == ["dummy"] * 4
    assert [leaving.end.error, working.end.error] == [None, None]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        ("the device is gone", ErrorCode.INTERNAL),
        ("CUDA error: unspecified launch failure", ErrorCode.PEER_LOST),
    ],
)
def test_a_rank_that_dies_ends_the_other_with_every_request_answered(
    failure: str, code: ErrorCode
) -> None:
    dying, other = make_ranks()
    dying.runner.failure = RuntimeError(failure)
    dying.runner.before_step = dying_meeting(dying)
    other.loop.submit(AddRequest(make_item(1, 60)))
    other.loop.submit(AddRequest(make_item(2, 60)))
    dying.loop.submit(AddRequest(make_item(3, 4)))
    start(dying, other)
    assert other.loop.join(60)
    assert isinstance(other.end.error, PeerLostError)
    failures = [event for event in other.events if isinstance(event, RequestFailed)]
    assert {event.nonce for event in failures} == {1, 2}
    assert {event.error.code for event in failures} == {ErrorCode.PEER_LOST}
    for event in failures:
        assert event.error.message.startswith("prefill-0 rank 1 of 2 cannot go on: ")
        assert "prefill-0 ends with all its ranks" in event.error.message
    assert dying.loop.join(60)
    # Its own request may be what it died of; a kernel that gave up waited for another rank.
    (own,) = (event for event in dying.events if isinstance(event, RequestFailed))
    assert own.error.code is code


def dying_meeting(rank: Rank) -> Callable[[], None]:
    """What breaks the group's collectives, as the end of a process does."""

    def leave() -> None:
        lockstep = rank.loop.steps._lockstep
        assert isinstance(lockstep, GroupLockstep)
        lockstep._group.meeting.barrier.abort()  # type: ignore[attr-defined]

    return leave


def test_ranks_of_different_lives_end_at_once() -> None:
    ranks = make_ranks(epochs=(7, 8))
    start(*ranks)
    for rank in ranks:
        assert rank.loop.join(60)
        assert rank.end.error is not None
        assert "different lives" in str(rank.end.error)


def test_no_error_where_the_others_are_gone_when_we_leave() -> None:
    meeting = Meeting(2)
    alone = Rank(0, meeting)
    meeting.barrier.abort()
    alone.loop.submit(StopLoop())
    alone.loop.take_commands()
    start(alone)
    assert alone.loop.join(60)
    assert alone.end.error is None
