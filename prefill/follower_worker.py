"""Any rank of a prefill worker but 0, as `runtime.service.run_service` drives it.

It has nothing but its loop, and ends when rank 0 says so or the group breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

import torch

from engine.boot import use_device
from prefill.assembly import RankParts, build_rank
from prefill.follower import Follower
from prefill.rank_link import FollowerLink
from prefill.rank_plan import Closure
from runtime.logging import get_logger
from runtime.worker import WorkerOptions

logger = get_logger(__name__)


class FollowerWorker:
    """See the module."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._follower: Follower | None = None
        self._parts: RankParts | None = None
        self._ended: asyncio.Future[None] | None = None
        self.is_stuck = False
        """The loop hangs in a collective: the process must not wait for its thread."""

    async def startup(self) -> None:
        """Build the rank and start to follow."""
        parts = await asyncio.to_thread(build_rank, self._options, self._ticket_closed)
        self._parts = parts
        self._follower = Follower(
            FollowerLink(parts.model.groups.tp_group, parts.plan_shape, parts.model.epoch),
            parts.model.runner,
            parts.send.sender,
            parts.send.push,
            block_size=parts.model.kv_pool.block_size,
            device=parts.model.kv_pool.device,
        )
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        # A daemon: a collective that never returns must not keep the process.
        thread = threading.Thread(
            target=_follow,
            args=(self._follower, parts.model.kv_pool.device, loop, self._ended),
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
        """Stop sending."""
        if self._parts is None:
            return
        await asyncio.to_thread(self._parts.send.close)
        self.is_stuck = self._ended is None or not self._ended.done()
        if not self.is_stuck:
            self._parts.model.close_transfers()
            self._parts.model.groups.destroy()

    def _ticket_closed(self, closure: Closure) -> None:
        assert self._follower is not None
        self._follower.ticket_closed(closure)


def _follow(
    follower: Follower,
    device: torch.device,
    event_loop: asyncio.AbstractEventLoop,
    ended: asyncio.Future[None],
) -> None:
    """The follower's thread: run, then tell the event loop how it ended."""
    error: Exception | None = None
    try:
        use_device(device)
        follower.run()
    except Exception as caught:
        logger.exception("the follower failed")
        error = caught

    def tell() -> None:
        if not ended.done():
            ended.set_exception(error) if error else ended.set_result(None)

    with contextlib.suppress(RuntimeError):
        event_loop.call_soon_threadsafe(tell)
