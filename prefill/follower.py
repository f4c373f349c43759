"""The loop of every rank but 0: take the plan, obey its commands, run its batch, push, answer.

A follower has no requests, no scheduler and no gRPC. It sends its own share of the blocks with its
own sender, and what that has closed goes to rank 0 with the answer to the next plan.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch

from engine.batch import ForwardBatch, pack_forward_batch
from engine.operations import do_nothing
from engine.step_error import StepError, may_fail
from prefill.commands import (
    AbandonTicket,
    CommandStream,
    FinishTicket,
    OpenTicket,
    PushBlocks,
)
from prefill.kv_push import PushSettings, StepPusher
from prefill.rank_plan import (
    CLOSURES_PER_ROW,
    BatchArrays,
    Closure,
    PlanKind,
    RankAnswer,
    StepPlan,
)
from prefill.sender_group import TicketSender
from runtime.logging import get_logger

logger = get_logger(__name__)

Watch = Callable[[str, int | None], AbstractContextManager[None]]
"""Given a name, and the tokens of the step (None: of the largest), limits what runs in it."""


class PlanSource(Protocol):
    """Where plans come from: `rank_link.FollowerLink`."""

    def exchange(self, answer: Callable[[StepPlan], RankAnswer]) -> bool:
        """Wait for the next plan and answer it; whether every rank runs its batch."""
        ...


class ForwardRunner(Protocol):
    """The part of `engine.runner.ModelRunner` that a follower uses."""

    def forward_only(
        self, batch: ForwardBatch, *, on_layer_done: Callable[[int], None] | None = None
    ) -> None:
        """Take part in a step that rank 0 executes."""
        ...


class Follower:
    """One rank's loop. `ticket_closed` is for the sender's threads, the rest for the loop's."""

    def __init__(
        self,
        plans: PlanSource,
        runner: ForwardRunner,
        sender: TicketSender,
        push: PushSettings,
        *,
        block_size: int,
        device: torch.device | str = "cpu",
        watch: Watch = lambda what, num_tokens: nullcontext(),
        count: Callable[[], object] = do_nothing,
    ) -> None:
        """Build; `run` follows.

        Args:
            plans: where they come from.
            runner: of this rank.
            sender: of this rank's share.
            push: how layers are grouped for sending.
            block_size: tokens per block.
            device: of the rank.
            watch: limits the time of what may never return; nothing is changed in it.
            count: takes part in adding up what the ranks' gates have counted.
        """
        self._watch, self._count = watch, count
        self._plans = plans
        self._runner = runner
        self._sender = sender
        self._push = push
        self._block_size = block_size
        self._device = device
        self._stream = CommandStream()
        self._pushes: list[PushBlocks] = []  # of the step that comes next
        self._closures: queue.SimpleQueue[Closure] = queue.SimpleQueue()
        self._plan = StepPlan(epoch=0, step=0, kind=PlanKind.COMMANDS)  # the latest
        self._batch: ForwardBatch | None = None  # of the latest plan

    def ticket_closed(self, closure: Closure) -> None:
        """Tell rank 0 with the next answer."""
        self._closures.put(closure)

    def run(self) -> None:
        """Follow until rank 0 says stop.

        Raises:
            PeerLostError: another rank is gone.
        """
        while self.follow():
            pass

    def follow(self) -> bool:
        """Obey one plan; whether another one will come."""
        with self._watch("the next plan of rank 0", None):
            is_agreed = self._plans.exchange(self._answer)
        plan, batch = self._plan, self._batch
        for command in self._stream.feed(plan.commands):
            if isinstance(command, PushBlocks):
                self._pushes.append(command)
            else:
                self._apply(command)
        if plan.batch is not None:
            pushes, self._pushes = self._pushes, []
            if is_agreed and batch is not None:
                self._run_step(batch, pushes)
        if plan.kind is PlanKind.COUNT:
            self._count()
        return plan.kind is not PlanKind.STOP

    def _answer(self, plan: StepPlan) -> RankAnswer:
        """Prepare a step, while nobody runs it yet; what cannot be prepared nobody runs."""
        self._plan, self._batch = plan, None
        try:
            if plan.batch is not None:
                with may_fail(torch.device(self._device), has_joined=False):
                    self._batch = make_batch(plan.batch, self._block_size, self._device)
        except StepError:
            logger.exception("a step cannot be prepared")
        refuses = plan.batch is not None and self._batch is None
        return RankAnswer(closures=self._take_closures(), refuses=refuses)

    def _apply(self, command: OpenTicket | FinishTicket | AbandonTicket) -> None:
        match command:
            case OpenTicket(ticket, peer):
                self._sender.open(ticket, peer)
            case FinishTicket(nonce):
                self._sender.finish(nonce, None)
            case AbandonTicket(nonce):
                self._sender.abandon(nonce)

    def _run_step(self, batch: ForwardBatch, pushes: Sequence[PushBlocks]) -> None:
        pusher = StepPusher(self._sender, pushes, self._push)
        with self._watch("a prefill step", batch.num_tokens):
            self._runner.forward_only(batch, on_layer_done=pusher.on_layer_done)
        pusher.finish()

    def _take_closures(self) -> list[Closure]:
        closures: list[Closure] = []
        while len(closures) < CLOSURES_PER_ROW and not self._closures.empty():
            closures.append(self._closures.get())
        return closures


def make_batch(
    arrays: BatchArrays, block_size: int, device: torch.device | str = "cpu"
) -> ForwardBatch:
    """The tensors of a step that came as a message, equal to those that rank 0 runs."""
    return pack_forward_batch(
        arrays.input_ids.astype(np.int64),
        arrays.query_lens.astype(np.int64),
        arrays.seq_lens.astype(np.int64),
        arrays.block_tables,
        logits_indices=arrays.logits_indices.astype(np.int64),
        block_size=block_size,
        device=device,
    )
