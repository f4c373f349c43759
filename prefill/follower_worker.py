"""Any rank of a tensor-parallel prefill worker but 0, as `runtime.service.run_service` drives it.

It has nothing but its loop, and ends when rank 0 says so or the group breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial

import torch

from engine.boot import use_device
from prefill.assembly import RankParts, build_rank
from prefill.follower import Follower
from prefill.rank_link import FollowerLink
from prefill.rank_plan import Closure
from runtime.daemon import run_on_daemon
from runtime.logging import get_logger
from runtime.watchdog import AbandonedError, Watchdog
from runtime.worker import WorkerOptions

logger = get_logger(__name__)

PLAN_MARGIN_S = 5.0
"""Rank 0 may take so long beside its steps before we hear of it; it says something every second."""


class FollowerWorker:
    """See the module."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._follower: Follower | None = None
        self._parts: RankParts | None = None
        self._ended: asyncio.Future[None] | None = None
        self._watchdog: Watchdog | None = None
        self.is_stuck = False
        """The loop did not end, or the device may hang: nobody may wait for either."""

    async def startup(self) -> None:
        """Build the rank and start to follow."""
        self.is_stuck = True  # unless the boot ends well; `shutdown` knows better
        build = partial(build_rank, self._options, self._ticket_closed)
        parts = await run_on_daemon(build, name="boot")
        self._parts = parts
        loop = asyncio.get_running_loop()
        ended = self._ended = loop.create_future()
        section = self._options.config.prefill
        watchdog = self._watchdog = Watchdog(partial(_tell, loop, ended))

        def watch(what: str, num_tokens: int | None) -> contextlib.AbstractContextManager[None]:
            if num_tokens is not None:
                return watchdog.watch(what, section.step_limit_s(num_tokens))
            limit_s = section.step_limit_s(section.max_num_batched_tokens)
            return watchdog.watch(what, limit_s and limit_s + PLAN_MARGIN_S)

        self._follower = Follower(
            FollowerLink(parts.model.groups.tp_group, parts.plan_shape, parts.model.epoch),
            parts.model.runner,
            parts.send.sender,
            parts.send.push,
            block_size=parts.model.kv_pool.block_size,
            device=parts.model.kv_pool.device,
            watch=watch,
        )
        watchdog.start()
        # A daemon: a collective that never returns must not keep the process.
        thread = threading.Thread(
            target=_follow,
            args=(self._follower, parts.model.kv_pool.device, partial(_tell, loop, ended)),
            name="follower",
            daemon=True,
        )
        thread.start()

    async def main_loop(self) -> None:
        """Run until rank 0 says stop.

        Raises:
            PeerLostError: the group broke.
        """
        assert self._ended is not None
        await asyncio.shield(self._ended)

    async def drain(self) -> None:
        """Go on until rank 0 has drained and says stop."""
        assert self._ended is not None
        await asyncio.shield(self._ended)

    async def shutdown(self) -> None:
        """Stop sending, and leave the group if it is whole."""
        if self._parts is None:
            return
        await asyncio.to_thread(self._parts.send.close)
        # A group that broke is not left in order: that takes all ranks, and kernels may wait.
        ended = self._ended
        self.is_stuck = ended is None or not ended.done() or ended.exception() is not None
        if not self.is_stuck:
            self._parts.model.close_transfers()
            self._parts.model.groups.destroy()
        if self._watchdog is not None:
            self._watchdog.close()

    def _ticket_closed(self, closure: Closure) -> None:
        assert self._follower is not None
        self._follower.ticket_closed(closure)


def _follow(
    follower: Follower, device: torch.device, tell: Callable[[Exception | None], None]
) -> None:
    """The follower's thread: run, then tell how it ended."""
    error: Exception | None = None
    try:
        use_device(device)
        follower.run()
    except AbandonedError:
        return  # the watchdog has told
    except Exception as caught:
        logger.exception("the follower failed")
        error = caught
    tell(error)


def _tell(
    event_loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None], error: Exception | None
) -> None:
    """On any thread: the loop is over, and why."""

    def set_ended() -> None:
        if not ended.done():
            ended.set_exception(error) if error else ended.set_result(None)

    with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
        event_loop.call_soon_threadsafe(set_ended)
