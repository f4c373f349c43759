"""A prefill step that never returns: everybody is answered, and other ranks end, too."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from engine.memory.block_pool import BlockPool
from engine.parallel.lockstep import GroupLockstep, Lockstep
from engine.pending_step import StepResult
from prefill.kv_push import PushSettings
from prefill.loop import EngineLoop, LoopSettings
from prefill.messages import AddRequest, Event, LoopEnded, RequestFailed
from prefill.rank_plan import BatchArrays
from prefill.scheduler import Scheduler
from prefill.sender_group import Answer, Followers, SenderGroup
from runtime.config import PrefillSection
from runtime.errors import InternalError, PeerLostError
from tests.prefill.fakes import (
    BLOCK_SIZE,
    FakePending,
    FakeRunner,
    FakeTicketSender,
    grant_all,
    make_item,
)
from tests.prefill.test_ranks import Meeting, make_group
from worker.endings import RankName
from worker.watchdog import StepOverdueError, WatchdogOptions

TIMEOUT_S = 60.0
ALONE = RankName(instance="prefill-0")


class HangingRunner(FakeRunner):
    """Hangs in a launch or in a collect, until it is released."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.release = threading.Event()

    def launch(self, scheduled, **hooks):  # type: ignore[no-untyped-def]
        if self.where == "launch":
            self.release.wait(TIMEOUT_S)
        pending = super().launch(scheduled, **hooks)
        return pending if self.where == "launch" else _Hanging(self, pending)


class _Hanging:
    """Its results never come."""

    idle_s = None

    def __init__(self, runner: HangingRunner, pending: FakePending) -> None:
        self._runner, self._pending = runner, pending

    @property
    def is_done(self) -> bool:
        return self._runner.release.is_set()

    def collect_sampled(self) -> list[StepResult] | None:
        return None

    def collect(self) -> list[StepResult]:
        self._runner.release.wait(TIMEOUT_S)
        return self._pending.collect()


def make_loop(
    runner: FakeRunner,
    emit: Callable[[Event], None],
    aborted: threading.Event,
    max_ahead: int,
    *,
    lockstep: Lockstep | None = None,
    followers: Followers | None = None,
    name: RankName = ALONE,
) -> EngineLoop:
    settings = LoopSettings(
        max_model_len=64,
        push=PushSettings(num_layers=runner.num_layers),
        name=name,
        idle_s=0.01,
        max_ahead=max_ahead,
        step_limit_s=PrefillSection(step_timeout_s=0.1).step_limit_s,
        watchdog=WatchdogOptions(poll_s=0.005, grace_s=0.3, abort=aborted.set),
    )
    scheduler = Scheduler(BlockPool(33, BLOCK_SIZE), max_num_seqs=4, max_num_batched_tokens=8)
    sender = FakeTicketSender(lambda closure: None)
    senders = SenderGroup(sender, followers)
    granting = grant_all(emit, lambda command: loop.submit(command))
    loop = EngineLoop(scheduler, runner, senders, granting, settings, lockstep=lockstep)
    return loop


@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("max_ahead", [0, 1])
def test_a_step_that_never_ends_is_given_up(where: str, max_ahead: int) -> None:
    runner, aborted, over = HangingRunner(where), threading.Event(), threading.Event()
    events: list[Event] = []

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, LoopEnded):
            over.set()

    loop = make_loop(runner, emit, aborted, max_ahead)
    items = {item.nonce: item for item in (make_item(serial, 10) for serial in range(1, 13))}
    for item in items.values():
        loop.submit(AddRequest(item))
    loop.start()
    assert over.wait(TIMEOUT_S)
    failed = [event for event in events if isinstance(event, RequestFailed)]
    assert {event.nonce for event in failed} == items.keys()
    told = set()
    for event in failed:
        in_step = items[event.nonce].request.is_in_step
        told.add(in_step)
        # One of those in the step may be the cause, and no other.
        assert type(event.error) is (InternalError if in_step else PeerLostError)
        assert event.error.suspect is in_step
        assert event.error.message.startswith("prefill-0 rank 0 of 1 failed: ")
        assert "did not end within 0.1 s" in event.error.message
    assert told == {True, False}
    assert isinstance(events[-1], LoopEnded)
    assert isinstance(events[-1].error, StepOverdueError)
    assert loop.steps.is_overdue
    num_events = len(events)
    runner.release.set()
    assert loop.join(TIMEOUT_S)
    assert len(events) == num_events, "the thread that came back changes nothing"
    assert aborted.wait(TIMEOUT_S)


class _Ending:
    """What a rank told until it ended."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.over = threading.Event()
        self.aborted = threading.Event()

    def emit(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, LoopEnded):
            self.over.set()

    def check_lost(self, nonces: set[int], prefix: str) -> None:
        """It gave a step up, and each of these requests may be served by another instance."""
        assert self.over.wait(TIMEOUT_S)
        failed = [event for event in self.events if isinstance(event, RequestFailed)]
        assert {event.nonce for event in failed} == nonces
        for event in failed:
            assert type(event.error) is PeerLostError
            assert event.error.message.startswith(prefix)
            assert "did not end within 0.1 s" in event.error.message
        last = self.events[-1]
        assert isinstance(last, LoopEnded)
        assert isinstance(last.error, StepOverdueError)


class SilentFollowers:
    """A follower that takes part in no step, until it is released."""

    num_followers = 1

    def __init__(self) -> None:
        self.release = threading.Event()

    def exchange(self, batch: BatchArrays | None, commands: bytes) -> Answer:
        if batch is not None:
            self.release.wait(TIMEOUT_S)
        return Answer()

    def stop(self) -> None:
        raise AssertionError("nobody is there to be told")


def test_a_follower_that_hangs_is_a_lost_rank() -> None:
    ending, followers = _Ending(), SilentFollowers()
    name = RankName(instance="prefill-0", num_ranks=2)
    loop = make_loop(FakeRunner(), ending.emit, ending.aborted, 0, followers=followers, name=name)
    loop.submit(AddRequest(make_item(1, 20)))
    loop.start()
    ending.check_lost({1}, "prefill-0 rank 0 of 2 cannot go on: telling the ranks")
    followers.release.set()
    assert loop.join(TIMEOUT_S)
    assert ending.aborted.wait(TIMEOUT_S)


@pytest.mark.parametrize("max_ahead", [0, 1])
def test_a_rank_that_hangs_ends_the_ranks_that_wait_for_it(max_ahead: int) -> None:
    meeting, hanging = Meeting(2), HangingRunner("launch")
    endings, loops = (_Ending(), _Ending()), []
    for rank, (runner, ending) in enumerate(zip((hanging, FakeRunner()), endings, strict=True)):
        lockstep = GroupLockstep(make_group(rank, 2, meeting), 7)
        name = RankName(instance="prefill-0", rank=rank, num_ranks=2)
        loop = make_loop(
            runner, ending.emit, ending.aborted, max_ahead, lockstep=lockstep, name=name
        )
        loop.submit(AddRequest(make_item(1, 20)))
        loop.submit(AddRequest(make_item(2, 20)))
        loops.append(loop)
    for loop in loops:
        loop.start()
    for rank, ending in enumerate(endings):
        ending.check_lost({1, 2}, f"prefill-0 rank {rank} of 2 cannot go on: ")
    assert "launch of a prefill step" in str(endings[0].events[-1])
    assert "meeting of the ranks before a prefill step" in str(endings[1].events[-1])
    hanging.release.set()
    meeting.barrier.abort()
    assert all(loop.join(TIMEOUT_S) for loop in loops)
    assert all(ending.aborted.wait(TIMEOUT_S) for ending in endings)


def test_the_limit_grows_with_the_step() -> None:
    section = PrefillSection(step_timeout_s=2.0)
    assert [section.step_limit_s(count) for count in (1, 4096, 16384)] == [2.0, 2.0, 8.0]
    assert PrefillSection(step_timeout_s=0.0).step_limit_s(10**6) == 0.0
