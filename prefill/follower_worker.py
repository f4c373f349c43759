"""Any rank of a tensor-parallel prefill worker but 0, as `worker.host` hosts it.

It has nothing but its loop, and ends when rank 0 says so or the group breaks.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future

from engine.boot.rank import use_device
from engine.experts.votes import ExpertTurns
from prefill.assembly import build_rank
from prefill.follower import Follower
from prefill.rank_link import FollowerLink
from prefill.rank_plan import Closure
from runtime.logging import get_logger
from worker.arguments import WorkerOptions
from worker.expert_moves import open_expert_moves
from worker.host import HostedRank, WorkerHost
from worker.watched_thread import WatchedThread

logger = get_logger(__name__)

PLAN_MARGIN_S = 5.0
"""Rank 0 may take so long beside its steps before we hear of it; it says something every second."""


class FollowerDriver:
    """See `worker.host.RoleDriver`; it has no endpoint."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._thread = WatchedThread("follower", self._run, _log_failure)
        self.start, self.ended = self._thread.start, self._thread.ended
        self.other_leaves: Future[None] = Future()  # never: rank 0 ends us when it leaves

    def boot(self) -> HostedRank:
        """Boot the rank."""
        self._parts = build_rank(self._options, self._ticket_closed)
        return self._parts.hosted()

    def build(
        self, host: WorkerHost, closing: contextlib.AsyncExitStack
    ) -> tuple[FollowerDriver, None]:
        """Make the follower; this object is its loop."""
        parts, model = self._parts, self._parts.model
        self._follower = Follower(
            FollowerLink(
                model.groups.tp_group,
                parts.plan_shape,
                model.epoch,
                self._open_moves(host, closing),
            ),
            model.runner,
            parts.send.sender,
            parts.send.push,
            block_size=model.kv_pool.block_size,
            device=model.kv_pool.device,
            watch=self._watch,
            count=self._count,
        )
        return self, None

    def stop(self, timeout_s: float) -> bool:
        """Whether it has ended: only rank 0 can say so."""
        return self.ended.done()

    def _run(self) -> None:
        use_device(self._parts.model.kv_pool.device)
        self._follower.run()

    def _open_moves(
        self, host: WorkerHost, closing: contextlib.AsyncExitStack
    ) -> ExpertTurns | None:
        """What moves experts between steps, where they may; rank 0 tells of their load."""
        model = self._parts.model
        if model.moves is None or model.experts is None:
            return None
        opened = open_expert_moves(
            self._options, model.moves, model.experts, None, epoch=model.epoch
        )
        closing.callback(opened.close)
        opened.watch(host.registry, host.health)
        return opened.rebalancer

    def _count(self) -> None:
        experts = self._parts.model.experts
        if experts is not None:
            experts.counter.start_reading(experts.sharing)

    def _watch(self, what: str, num_tokens: int | None) -> contextlib.AbstractContextManager[None]:
        section = self._options.config.prefill
        if num_tokens is not None:
            return self._thread.watch(what, section.step_limit_s(num_tokens))
        limit_s = section.step_limit_s(section.sizes.max_num_batched_tokens)
        return self._thread.watch(what, limit_s and limit_s + PLAN_MARGIN_S)

    def _ticket_closed(self, closure: Closure) -> None:
        self._follower.ticket_closed(closure)


def _log_failure(error: BaseException | None) -> BaseException | None:
    if error is not None:
        logger.error("the follower failed", exc_info=error)
    return error
