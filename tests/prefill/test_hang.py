"""A prefill step that never returns: everybody is answered, and other ranks end, too."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from engine.memory.block_pool import BlockPool
from engine.parallel.lockstep import GroupLockstep, Lockstep
from engine.runner import StepResult
from prefill.kv_push import PushSettings
from prefill.loop import EngineLoop, LoopSettings
from prefill.messages import AddRequest, Event, LoopEnded, RequestFailed
from prefill.scheduler import Scheduler
from prefill.sender_group import SenderGroup
from runtime.config import PrefillSection
from runtime.watchdog import StepOverdueError, WatchdogOptions
from tests.prefill.fakes import BLOCK_SIZE, FakePending, FakeRunner, FakeTicketSender, make_item
from tests.prefill.test_ranks import Meeting, make_group

TIMEOUT_S = 10


class HangingRunner(FakeRunner):
    """Hangs in a launch or in a collect, until it is released."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.release = threading.Event()

    def launch(self, scheduled, *, on_layer_done=None, keep_hidden=False):  # type: ignore[no-untyped-def]
        if self.where == "launch":
            self.release.wait(TIMEOUT_S)
        pending = super().launch(scheduled, on_layer_done=on_layer_done, keep_hidden=keep_hidden)
        return pending if self.where == "launch" else _Hanging(self, pending)


class _Hanging:
    """Its results never come."""

    idle_s = None

    def __init__(self, runner: HangingRunner, pending: FakePending) -> None:
        self._runner, self._pending = runner, pending

    @property
    def is_done(self) -> bool:
        return self._runner.release.is_set()

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
) -> EngineLoop:
    settings = LoopSettings(
        max_model_len=64,
        push=PushSettings(num_layers=runner.num_layers),
        idle_s=0.01,
        max_ahead=max_ahead,
        step_limit_s=PrefillSection(step_timeout_s=0.1).step_limit_s,
        watchdog=WatchdogOptions(poll_s=0.005, grace_s=0.3, abort=aborted.set),
    )
    scheduler = Scheduler(BlockPool(33, BLOCK_SIZE), max_num_seqs=4, max_num_batched_tokens=8)
    sender = FakeTicketSender(lambda closure: None)
    return EngineLoop(scheduler, runner, SenderGroup(sender), emit, settings, lockstep=lockstep)


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
    for serial in (1, 2):
        loop.submit(AddRequest(make_item(serial, 10)))
    loop.start()
    assert over.wait(TIMEOUT_S)
    failed = [event for event in events if isinstance(event, RequestFailed)]
    assert len(failed) == 2
    assert all("did not end within 0.1 s" in str(event.error) for event in failed)
    assert isinstance(events[-1], LoopEnded)
    assert isinstance(events[-1].error, StepOverdueError)
    assert loop.is_abandoned
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


@pytest.mark.parametrize("max_ahead", [0, 1])
def test_a_rank_that_hangs_ends_the_ranks_that_wait_for_it(max_ahead: int) -> None:
    meeting, hanging = Meeting(2), HangingRunner("launch")
    endings, loops = (_Ending(), _Ending()), []
    for rank, (runner, ending) in enumerate(zip((hanging, FakeRunner()), endings, strict=True)):
        lockstep = GroupLockstep(make_group(rank, 2, meeting), 7)
        loop = make_loop(runner, ending.emit, ending.aborted, max_ahead, lockstep=lockstep)
        loop.submit(AddRequest(make_item(1, 20)))
        loop.submit(AddRequest(make_item(2, 20)))
        loops.append(loop)
    for loop in loops:
        loop.start()
    for ending in endings:
        assert ending.over.wait(TIMEOUT_S)
        failed = [event for event in ending.events if isinstance(event, RequestFailed)]
        assert {event.nonce for event in failed} == {1, 2}
        last = ending.events[-1]
        assert isinstance(last, LoopEnded)
        assert isinstance(last.error, StepOverdueError)
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
