"""Rank 0 and a follower in two threads: the same batches, the same pushes, all closures."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.batch import ForwardBatch, build_forward_batch
from engine.memory.block_pool import BlockPool
from engine.parallel.groups import RankGroup, agree_on_epoch
from engine.step_error import StepError
from prefill import follower
from prefill.follower import Follower, make_batch
from prefill.kv_push import PushSettings
from prefill.loop import EngineLoop, LoopSettings
from prefill.messages import (
    AddRequest,
    CancelRequest,
    Event,
    FirstTokenSampled,
    LoopEnded,
    PartClosed,
    RankClosed,
    RequestFailed,
    RequestFinished,
    StopLoop,
)
from prefill.rank_link import FollowerLink, LeaderLink
from prefill.rank_plan import Closure, ClosureOutcome, PlanShape
from prefill.scheduler import Scheduler
from prefill.sender_group import SenderGroup
from runtime.errors import InternalError, PeerLostError, RequestCancelledError
from tests.prefill.fakes import BLOCK_SIZE, FakeRunner, FakeTicketSender, grant_all, make_item
from tests.waiting import wait_until

SHAPE = PlanShape(max_num_tokens=16, max_num_seqs=4, max_num_blocks=16, num_command_bytes=48)


class Meeting:
    """Where the threads of a group exchange tensors."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.tensors: dict[int, torch.Tensor] = {}

    def exchange(self, rank: int, tensor: torch.Tensor) -> dict[int, torch.Tensor]:
        try:
            self.tensors[rank] = tensor.clone()
            self.barrier.wait()
            seen = dict(self.tensors)
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise PeerLostError("another rank was lost") from error
        return seen


class ThreadGroup(RankGroup):
    """A `RankGroup` whose ranks are threads."""

    __slots__ = ("meeting",)
    meeting: Meeting

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self.meeting.exchange(self.rank, tensor)[0])

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        seen = self.meeting.exchange(self.rank, tensor)
        return torch.cat([seen[rank] for rank in range(self.size)])

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        seen = self.meeting.exchange(self.rank, tensor)
        return tensor.copy_(torch.stack([seen[rank] for rank in range(self.size)]).sum(0))


def make_group(rank: int, size: int, meeting: Meeting) -> ThreadGroup:
    group = ThreadGroup(rank=rank, size=size)
    object.__setattr__(group, "meeting", meeting)
    return group


class FollowerRunner:
    """Remembers the batches that it is given."""

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []

    def forward_only(
        self, batch: ForwardBatch, *, on_layer_done: Callable[[int], None] | None = None
    ) -> None:
        self.batches.append(batch)
        for layer in range(3):
            if on_layer_done:
                on_layer_done(layer)


class LeaderRunner(FakeRunner):
    """Remembers the batches that a real runner would build."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[ForwardBatch] = []

    def launch(self, scheduled, **hooks):  # type: ignore[no-untyped-def]
        self.batches.append(build_forward_batch(scheduled, BLOCK_SIZE))
        return super().launch(scheduled, **hooks)


class Pair:
    """An engine loop and a follower, each on a thread, that meet in memory."""

    def __init__(
        self, *, follower_epoch: int = 7, timeout_s: float = 60.0, max_ahead: int = 0
    ) -> None:
        meeting = Meeting(2, timeout_s)
        push = PushSettings(num_layers=3, layers_per_group=2)
        self.events: list[Event] = []
        self.leader_runner, self.follower_runner = LeaderRunner(), FollowerRunner()
        self.leader_sender = FakeTicketSender(
            lambda closure: self.loop.submit(RankClosed(0, closure))
        )
        self.follower_sender = FakeTicketSender(
            lambda closure: self.follower.ticket_closed(closure)
        )
        self.scheduler = Scheduler(
            BlockPool(200, BLOCK_SIZE), max_num_seqs=4, max_num_batched_tokens=16
        )
        self.loop = EngineLoop(
            self.scheduler,
            self.leader_runner,
            SenderGroup(self.leader_sender, LeaderLink(make_group(0, 2, meeting), SHAPE, 7)),
            grant_all(self.events.append, lambda command: self.loop.submit(command)),
            LoopSettings(
                max_model_len=64, push=push, max_ahead=max_ahead, idle_s=0.01, heartbeat_s=0.05
            ),
        )
        self.follower = Follower(
            FollowerLink(make_group(1, 2, meeting), SHAPE, follower_epoch),
            self.follower_runner,
            self.follower_sender,
            push,
            block_size=BLOCK_SIZE,
        )
        self.failure: Exception | None = None
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        self.thread.start()
        self.loop.start()

    def stop(self) -> None:
        self.loop.submit(StopLoop())
        assert self.loop.join(60)
        self.thread.join(60)
        assert not self.thread.is_alive()

    def until(self, condition: Callable[[], object]) -> None:
        try:
            wait_until(condition)
        except AssertionError as error:
            error.add_note(f"{self.events} {self.failure!r}")
            raise

    def until_tickets(self, states: dict[int, str]) -> None:
        """Wait until both ranks hold exactly these tickets: rank 0 may be ahead of the other."""
        senders = (self.leader_sender, self.follower_sender)
        self.until(lambda: all(sender.open_tickets == states for sender in senders))

    def count(self, event_type: type[Event]) -> int:
        return sum(isinstance(event, event_type) for event in self.events)

    def _follow(self) -> None:
        try:
            self.follower.run()
        except Exception as error:
            self.failure = error


@pytest.mark.parametrize("max_ahead", [0, 1])
def test_a_follower_runs_the_same_batches_and_makes_the_same_pushes(max_ahead: int) -> None:
    pair = Pair(max_ahead=max_ahead)
    for nonce in range(1, 6):
        pair.loop.submit(AddRequest(make_item(nonce, 7 * nonce)))
    pair.start()
    pair.until(lambda: pair.count(FirstTokenSampled) == 5)
    pair.until_tickets(dict.fromkeys(range(1, 6), "finishing"))
    assert pair.follower_sender.pushed == pair.leader_sender.pushed
    assert pair.follower_sender.records == dict.fromkeys(range(1, 6))  # rank 0 sends the record
    for ours, theirs in zip(pair.leader_runner.batches, pair.follower_runner.batches, strict=True):
        for name in ForwardBatch.__slots__:
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    pair.leader_sender.close_all()
    pair.until(lambda: pair.count(PartClosed) == 5)
    assert pair.count(RequestFinished) == 0  # the follower still reads the blocks
    pair.follower_sender.close_all()
    pair.until(lambda: pair.count(RequestFinished) == 5)
    pair.stop()
    assert pair.failure is None
    pair.scheduler.check_integrity()


@pytest.mark.parametrize("max_ahead", [0, 1])
def test_a_cancelled_request_keeps_its_blocks_until_the_follower_has_drained(
    max_ahead: int,
) -> None:
    pair = Pair(max_ahead=max_ahead)
    item = make_item(1, 12)
    pair.loop.submit(AddRequest(item))
    pair.start()
    pair.until(lambda: pair.count(FirstTokenSampled) == 1)
    pair.loop.submit(CancelRequest(1, RequestCancelledError("client left")))
    pair.until_tickets({1: "abandoned"})
    pair.leader_sender.close_all()
    pair.until(lambda: pair.count(PartClosed) == 1)
    assert item.request.block_table
    pair.follower_sender.close_all()
    pair.until(lambda: pair.count(RequestFinished) == 1)
    pair.stop()
    parts = [event for event in pair.events if isinstance(event, PartClosed)]
    assert [event.rank for event in parts] == [0, 1]
    assert {event.closure.outcome for event in parts} == {ClosureOutcome.ABANDONED}


@pytest.mark.parametrize("max_ahead", [0, 1])
@pytest.mark.parametrize("where", ["rank 0", "follower"])
def test_a_step_that_one_rank_cannot_prepare_no_rank_runs(
    where: str, max_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(max_ahead=max_ahead)
    tickets: dict[int, str] = {}  # rank 0 opens none for a step that it cannot prepare
    if where == "rank 0":
        pair.leader_runner.unprepared = [StepError("no room", has_joined=False)]
        reason = "its step failed: no room"
    else:
        makers = iter([fail_to_make])
        monkeypatch.setattr(follower, "make_batch", lambda *args: next(makers, make_batch)(*args))
        reason = "its step failed: rank 1 cannot prepare it; its log says why"
        tickets = {1: "abandoned"}
    pair.loop.submit(AddRequest(make_item(1, 16)))
    pair.loop.submit(AddRequest(make_item(2, 12)))
    pair.start()
    pair.until(lambda: pair.count(FirstTokenSampled) == 1)
    pair.until_tickets(tickets | {2: "finishing"})
    pair.leader_sender.close_all()
    pair.follower_sender.close_all()
    pair.until(lambda: pair.count(RequestFinished) == 2)
    pair.stop()
    (failed,) = (event for event in pair.events if isinstance(event, RequestFailed))
    assert (failed.nonce, failed.error.message) == (1, reason)
    assert pair.failure is None
    assert len(pair.leader_runner.batches) == len(pair.follower_runner.batches) == 1
    assert {push.nonce for push, _ in pair.follower_sender.pushed} == {2}
    assert pair.follower_sender.pushed == pair.leader_sender.pushed
    pair.scheduler.check_integrity()


def fail_to_make(*args: object) -> ForwardBatch:
    raise MemoryError("no pinned memory")


def test_more_closures_than_fit_one_row_come_in_several() -> None:
    pair = Pair()
    for nonce in range(1, 31):
        pair.loop.submit(AddRequest(make_item(nonce, 4)))
    pair.start()
    pair.until(lambda: pair.count(FirstTokenSampled) == 30)
    pair.until_tickets(dict.fromkeys(range(1, 31), "finishing"))
    pair.leader_sender.close_all()
    pair.follower_sender.close_all()
    pair.until(lambda: pair.count(RequestFinished) == 30)
    pair.stop()
    pair.scheduler.check_integrity()


def test_a_follower_of_another_life_ends_the_instance() -> None:
    pair = Pair(follower_epoch=8, timeout_s=0.5)
    pair.start()
    pair.until(lambda: pair.count(LoopEnded) == 1)
    pair.thread.join(60)
    assert isinstance(pair.failure, InternalError)
    ended = pair.events[-1]
    assert isinstance(ended, LoopEnded)
    assert isinstance(ended.error, PeerLostError)


def test_all_ranks_agree_on_rank_0s_epoch() -> None:
    meeting, epochs = Meeting(3), {}

    def agree(rank: int) -> None:
        epochs[rank] = agree_on_epoch(make_group(rank, 3, meeting))

    threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(epochs.values())) == 1
    assert 0 < epochs[0] < 2**63
    assert agree_on_epoch(RankGroup()) != agree_on_epoch(RankGroup())


def test_a_closure_out_of_turn_is_a_bug_and_ends_the_loop() -> None:
    pair = Pair()
    pair.start()
    stray = Closure(nonce=99, outcome=ClosureOutcome.SENT)
    pair.loop.submit(RankClosed(1, stray))
    pair.until(lambda: pair.count(LoopEnded) == 1)
    ended = pair.events[-1]
    assert isinstance(ended, LoopEnded)
    with pytest.raises(InternalError, match="out of turn"):
        raise ended.error or AssertionError
