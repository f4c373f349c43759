"""The engine loop: commands between steps, dummy batches, rests, and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import pytest
from prometheus_client import CollectorRegistry

from decode.frames import Delta
from decode.loop import DecodeSteps, EngineLoop
from decode.metrics import DecodeMetrics
from decode.requests import DecodeRequest, RejectedUpdate
from engine.parallel.lockstep import GroupState, Lockstep, RankState, SoloLockstep
from engine.pending_step import StepResult
from engine.request import ScheduledRequest
from engine.sampling.inputs import SampledToken
from engine.step_error import StepError
from runtime.errors import (
    DeviceError,
    DrainingError,
    InternalError,
    InvalidRequestError,
    PeerLostError,
    TandemError,
)
from runtime.pb import registry_pb2
from runtime.sampling import FinishReason
from tests.decode.test_rank import Bench
from worker.endings import RankName
from worker.step_driver import LoopOptions

TIMEOUT_S = 60.0


class FakePending:
    """A step that is over when it is collected."""

    idle_s = None

    def __init__(self, runner: FakeRunner, results: list[StepResult]) -> None:
        self._runner, self._results = runner, results

    def collect_sampled(self) -> list[StepResult] | None:
        return None

    def collect(self) -> list[StepResult]:
        self._runner.num_in_flight -= 1
        return self._results


class FakeRunner:
    """One token a request and step; counts."""

    def __init__(self) -> None:
        self.num_dummies = 0
        self.num_in_flight = 0
        self.most_in_flight = 0
        self.error: Exception | None = None
        self.errors: list[StepError | None] = []  # of the next steps

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        after: object = None,
        group_mean: int = 0,
        num_drafts: int | None = None,
    ) -> FakePending:
        if self.error is not None:
            raise self.error
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        assert group_mean > 0
        assert (after is not None) == (self.num_in_flight > 0)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        results = [StepResult(request=s.request, sampled=SampledToken(9)) for s in scheduled]
        return FakePending(self, results)

    def run_dummy(self, *, group_mean: int = 0, num_drafts: int | None = None) -> None:
        assert group_mean > 0
        self.num_dummies += 1


class PeerWithWork:
    """A group in which another rank has work for a while, and then leaves or dies."""

    is_group = True

    def __init__(self, num_steps: int, error: TandemError | None = None) -> None:
        self.states: list[RankState] = []
        self._num_steps = num_steps
        self._error = error

    def lose(self, error: TandemError) -> None:
        """Have no more work, and die."""
        self._num_steps, self._error = 0, error

    def exchange(self, state: RankState) -> GroupState:
        self.states.append(state)
        busy = len(self.states) <= self._num_steps
        if not busy and self._error is not None:
            raise self._error
        return GroupState(
            has_work=busy, max_num_tokens=1, mean_num_tokens=1, all_leaving=state.leaving
        )


class Driver:
    """A loop around a rank of fakes."""

    def __init__(self, lockstep: Lockstep | None = None, name: RankName | None = None) -> None:
        self.bench = Bench()
        self.runner = FakeRunner()
        self.deltas: list[Delta] = []
        name = name or RankName(instance="decode")
        steps = DecodeSteps(
            self.bench.rank,
            self.runner,
            metrics=DecodeMetrics(CollectorRegistry()),
            publish=self._publish,
            name=name,
        )
        self.loop = EngineLoop(
            steps, lockstep or SoloLockstep(), LoopOptions(name=name, step="decode")
        )
        self.ended = self.loop.ended

    def _publish(self, news: Mapping[str, list[Delta]], load: registry_pb2.WorkerLoad) -> None:
        assert threading.current_thread().name == "engine-loop"
        assert load.num_total_blocks == 12
        self.deltas += [delta for deltas in news.values() for delta in deltas]

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def add_running(self) -> DecodeRequest:
        def work() -> DecodeRequest:
            request = self.bench.reserve(6, max_tokens=6)
            self.bench.arrive(request)
            return request

        return self.loop.submit(work).result(TIMEOUT_S)

    @property
    def last(self) -> Delta:
        return self.deltas[-1]


def test_a_request_runs_and_the_loop_stops() -> None:
    driver = Driver()
    driver.loop.start()
    driver.add_running()
    driver.wait(lambda: any(delta.finish_reason for delta in driver.deltas))
    assert driver.last.finish_reason is FinishReason.LENGTH
    assert [delta.start_index for delta in driver.deltas] == [1, 2, 3, 4, 5]
    assert driver.loop.stop(TIMEOUT_S)
    assert driver.ended.result(TIMEOUT_S) is None


def test_commands_return_raise_and_are_refused_after_the_end() -> None:
    driver = Driver()
    driver.loop.start()
    assert driver.loop.submit(lambda: 5).result(TIMEOUT_S) == 5

    def refuse() -> None:
        raise InvalidRequestError("no")

    with pytest.raises(InvalidRequestError):
        driver.loop.submit(refuse).result(TIMEOUT_S)
    assert driver.loop.submit(lambda: 6).result(TIMEOUT_S) == 6  # the loop goes on
    assert driver.loop.stop(TIMEOUT_S)
    with pytest.raises(DrainingError, match="decode rank 0 of 1 has ended: use another one"):
        driver.loop.submit(lambda: 7).result(TIMEOUT_S)


def test_a_cancelled_command_is_not_run() -> None:
    driver = Driver()
    ran: list[int] = []
    future = driver.loop.submit(lambda: ran.append(1))
    assert future.cancel()
    driver.loop.start()
    driver.loop.submit(lambda: None).result(TIMEOUT_S)
    assert ran == []
    assert driver.loop.stop(TIMEOUT_S)


@pytest.mark.parametrize("error", [InternalError("broken"), ZeroDivisionError("broken")])
def test_a_broken_invariant_ends_the_loop_and_answers_everybody(error: Exception) -> None:
    driver = Driver()
    driver.loop.start()

    def break_it() -> None:
        driver.bench.arrive(driver.bench.reserve())
        raise error

    with pytest.raises(type(error)):
        driver.loop.submit(break_it).result(TIMEOUT_S)
    ended = driver.ended.result(TIMEOUT_S)
    assert isinstance(ended, InternalError)
    assert driver.last.finish_reason is FinishReason.ERROR
    assert type(driver.last.error) is InternalError
    assert "decode rank 0 of 1 failed: " in str(driver.last.error)
    assert driver.last.error.suspect
    with pytest.raises(DrainingError):
        driver.loop.submit(lambda: 1).result(TIMEOUT_S)


def test_a_failing_step_ends_the_loop() -> None:
    driver = Driver()
    driver.runner.error = RuntimeError("no device")
    driver.loop.start()
    driver.add_running()
    assert "RuntimeError: no device" in str(driver.ended.result(TIMEOUT_S))
    assert driver.last.finish_reason is FinishReason.ERROR
    assert driver.last.error is not None
    assert driver.last.error.suspect


@pytest.mark.parametrize("at_fault", [False, True])
def test_a_step_that_fails_ends_its_requests_and_the_rest_goes_on(at_fault: bool) -> None:
    driver = Driver()
    first = driver.loop.submit(lambda: driver.bench.reserve(6, max_tokens=6))
    second = driver.loop.submit(lambda: driver.bench.reserve(6, max_tokens=6))

    def arrive() -> None:
        driver.bench.arrive(first.result())
        driver.bench.arrive(second.result())
        name = second.result().request_id if at_fault else ""
        driver.runner.errors = [
            None,
            StepError("no room", request_id=name, has_joined=not at_fault),
        ]

    driver.loop.submit(arrive)
    driver.loop.start()
    driver.wait(lambda: sum(delta.finish_reason is not None for delta in driver.deltas) == 2)
    ends = {delta.request_id: delta for delta in driver.deltas if delta.finish_reason}
    failed = ends[second.result().request_id]
    assert failed.finish_reason is FinishReason.ERROR
    assert type(failed.error) is InternalError
    assert failed.error.message == "its step failed: no room"
    assert failed.error.suspect is not at_fault
    other = ends[first.result().request_id]
    assert other.finish_reason is (FinishReason.LENGTH if at_fault else FinishReason.ERROR)
    driver.add_running()
    driver.wait(lambda: sum(delta.finish_reason is not None for delta in driver.deltas) == 3)
    assert driver.last.finish_reason is FinishReason.LENGTH
    driver.loop.submit(driver.bench.check_empty).result(TIMEOUT_S)
    assert driver.loop.stop(TIMEOUT_S)
    assert driver.ended.result(TIMEOUT_S) is None


def test_what_was_submitted_before_the_end_is_answered() -> None:
    driver = Driver()
    driver.runner.error = RuntimeError("no device")
    first = driver.loop.submit(lambda: driver.bench.arrive(driver.bench.reserve()))

    def slow() -> None:
        time.sleep(0.2)  # meanwhile the next command comes

    driver.loop.submit(slow)
    driver.loop.start()
    first.result(TIMEOUT_S)
    late = [driver.loop.submit(lambda: len(driver.bench.rank.live)) for _ in range(3)]
    for future in late:
        assert future.exception(TIMEOUT_S) is None or isinstance(future.exception(), DrainingError)
    assert driver.ended.result(TIMEOUT_S) is not None
    assert len(driver.bench.rank.live) == 0


def test_an_idle_rank_runs_dummies_while_another_works() -> None:
    peer = PeerWithWork(num_steps=5)
    driver = Driver(peer)
    driver.loop.start()
    driver.wait(lambda: len(peer.states) > 10)
    assert driver.runner.num_dummies == 5
    assert all(state.num_tokens == 0 for state in peer.states)
    assert driver.loop.stop(TIMEOUT_S)
    assert peer.states[-1].leaving


def test_a_lost_rank_ends_the_group_with_its_own_error() -> None:
    driver = Driver(PeerWithWork(num_steps=3, error=PeerLostError("rank 1 is gone")))
    driver.loop.start()
    ended = driver.ended.result(TIMEOUT_S)
    assert isinstance(ended, PeerLostError)


@pytest.mark.parametrize("trap", [False, True])
def test_survivors_say_that_their_group_is_lost_and_what_becomes_of_it(trap: bool) -> None:
    peer = PeerWithWork(num_steps=10**6)
    driver = Driver(peer, RankName(instance="decode-0", rank=0, num_ranks=2))
    waiting = driver.loop.submit(lambda: driver.bench.reserve(6, max_tokens=6))
    queued = driver.loop.submit(lambda: driver.bench.reserve(40))
    if trap:
        driver.runner.error = RuntimeError("CUDA error: unspecified launch failure")
        driver.loop.submit(lambda: driver.bench.arrive(waiting.result()))
    else:
        peer.lose(PeerLostError("another rank was lost in all_gather"))
    driver.loop.start()
    assert isinstance(driver.ended.result(TIMEOUT_S), PeerLostError)
    rejected = driver.bench.updates[queued.result().request_id][-1]
    assert isinstance(rejected, RejectedUpdate)
    for error in (driver.last.error, rejected.error):
        assert type(error) is PeerLostError
        assert error.message.startswith("decode-0 rank 0 of 2 cannot go on: ")
        assert "another rank" in error.message
        assert error.message.endswith(
            "decode-0 ends with all its ranks, and starts again where it is supervised"
        )
    with pytest.raises(DrainingError, match="decode-0 rank 0 of 2 has ended: use another one"):
        driver.loop.submit(lambda: 1).result(TIMEOUT_S)


def test_alone_the_same_error_of_a_gpu_is_the_ranks_own() -> None:
    driver = Driver()
    driver.runner.error = RuntimeError("CUDA error: unspecified launch failure")
    driver.loop.start()
    driver.add_running()
    assert type(driver.ended.result(TIMEOUT_S)) is DeviceError
    assert type(driver.last.error) is InternalError
    assert driver.last.error.suspect


def test_what_is_left_when_the_rank_is_told_to_stop_may_go_elsewhere() -> None:
    driver = Driver()
    driver.loop.submit(driver.bench.reserve)  # its KV never comes
    driver.loop.start()
    assert driver.loop.stop(TIMEOUT_S)
    assert driver.ended.result(TIMEOUT_S) is None
    assert type(driver.last.error) is DrainingError


def test_a_rank_that_leaves_does_not_mind_that_the_others_left_first() -> None:
    driver = Driver(PeerWithWork(num_steps=0, error=PeerLostError("rank 1 is gone")))
    driver.loop.submit(driver.loop.leave)
    driver.loop.start()
    assert driver.ended.result(TIMEOUT_S) is None


def test_idle_checks_the_books() -> None:
    driver = Driver()
    driver.loop.start()
    driver.add_running()
    driver.wait(lambda: any(delta.finish_reason for delta in driver.deltas))
    # A block that nobody holds any more is lost: the next time the rank falls idle it notices.
    driver.loop.submit(lambda: driver.bench.pool.allocate(1))
    driver.add_running()
    ended = driver.ended.result(TIMEOUT_S)
    assert "1 KV blocks are held and no request is left" in str(ended)
