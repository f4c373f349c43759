"""A decode step that never returns: everybody is answered, the process is told, nobody waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import pytest
from prometheus_client import CollectorRegistry

from decode.frames import Delta
from decode.loop import DecodeSteps, EngineLoop
from decode.metrics import DecodeMetrics
from engine.parallel.lockstep import GroupState, RankState, SoloLockstep
from engine.pending_step import StepResult
from engine.request import ScheduledRequest
from runtime.errors import DrainingError, InternalError, PeerLostError, TandemError
from runtime.pb import registry_pb2
from runtime.sampling import FinishReason
from tests.decode.test_loop import FakePending, FakeRunner
from tests.decode.test_rank import Bench
from worker.endings import RankName
from worker.step_driver import LoopOptions
from worker.watchdog import StepOverdueError, WatchdogOptions

TIMEOUT_S = 60.0


class HangingPending(FakePending):
    """Its results never come: the step waits for a rank that is gone."""

    def collect(self) -> list[StepResult]:
        assert isinstance(self._runner, HangingRunner)
        self._runner.release.wait(TIMEOUT_S)
        return super().collect()


class HangingRunner(FakeRunner):
    """Hangs in a launch or in a collect, until it is released."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.release = threading.Event()

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        after: object = None,
        group_mean: int = 0,
        num_drafts: int | None = None,
    ) -> FakePending:
        if self.where == "launch":
            self.release.wait(TIMEOUT_S)
        pending = super().launch(scheduled, after=after, group_mean=group_mean)
        return HangingPending(self, pending._results) if self.where == "collect" else pending

    def run_dummy(self, *, group_mean: int = 0, num_drafts: int | None = None) -> None:
        if self.where == "dummy":
            self.release.wait(TIMEOUT_S)


class HangingPeer:
    """A group whose other rank is busy, and at some time does not come."""

    is_group = True

    def __init__(self, runner: HangingRunner) -> None:
        self._runner = runner

    def exchange(self, state: RankState) -> GroupState:
        if self._runner.where == "exchange" and state.num_tokens:
            self._runner.release.wait(TIMEOUT_S)
        return GroupState(
            has_work=True, max_num_tokens=1, mean_num_tokens=1, all_leaving=state.leaving
        )


def check_told(deltas: list[Delta], request_id: str) -> TandemError:
    """What a request was told of the step that did not end."""
    (last,) = (delta for delta in deltas if delta.request_id == request_id and delta.error)
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert "did not end within 0.1 s" in last.error.message
    return last.error


@pytest.mark.parametrize(
    ("where", "is_group"),
    [
        ("launch", False),
        ("launch", True),
        ("collect", False),
        ("collect", True),
        ("dummy", True),
        ("exchange", True),
    ],
)
def test_a_step_that_never_ends_is_given_up(where: str, is_group: bool) -> None:
    bench, runner = Bench(), HangingRunner(where)
    deltas: list[Delta] = []
    aborted = threading.Event()

    def publish(news: Mapping[str, list[Delta]], load: registry_pb2.WorkerLoad) -> None:
        deltas.extend(delta for some in news.values() for delta in some)

    name = RankName(instance="decode-0", num_ranks=2 if is_group else 1)
    metrics = DecodeMetrics(CollectorRegistry())
    loop = EngineLoop(
        DecodeSteps(bench.rank, runner, metrics=metrics, publish=publish, name=name),
        HangingPeer(runner) if is_group else SoloLockstep(),
        LoopOptions(
            name=name,
            step="decode",
            limit_s=lambda num_tokens: 0.1,
            watchdog=WatchdogOptions(poll_s=0.005, grace_s=0.3, abort=aborted.set),
        ),
    )
    waiting = loop.submit(lambda: bench.reserve(6, max_tokens=6))
    if where != "dummy":
        loop.submit(lambda: bench.arrive(waiting.result()))
    beside = loop.submit(lambda: bench.reserve(6, max_tokens=6))
    started = time.monotonic()
    loop.start()
    error = loop.ended.result(TIMEOUT_S)
    assert time.monotonic() - started < 20  # and not when the call returns
    assert isinstance(error, StepOverdueError)
    assert "did not end within 0.1 s" in str(error)
    if where != "dummy":
        told = check_told(deltas, waiting.result().request_id)
        # In a group it waits for another rank, as a rule; but its request may be why.
        assert type(told) is (PeerLostError if is_group else InternalError)
        assert told.suspect
    told = check_told(deltas, beside.result().request_id)
    assert (type(told), told.suspect) == (PeerLostError, False)
    assert len(bench.rank.live) == 0
    with pytest.raises(DrainingError):
        loop.submit(lambda: 1).result(TIMEOUT_S)
    assert not loop.stop(TIMEOUT_S), "nobody waits for the thread that hangs"
    # Should the call return after all, its thread changes nothing any more.
    num_deltas = len(deltas)
    runner.release.set()
    assert loop.join(TIMEOUT_S)
    assert len(deltas) == num_deltas
    assert aborted.wait(TIMEOUT_S)
