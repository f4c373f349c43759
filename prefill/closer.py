"""Telling decode that a rank will write no more under a ticket: always, and a few times if need be.

Decode frees a request's blocks by these messages, so each is retried while decode is briefly out of
reach. When decode stays out of reach the message is dropped with a log line: a decode rank that is
gone has no blocks, and one that lives fences us after its own timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prefill.peers import ChannelCache
from runtime.errors import DeadlineExceededError, PeerLostError, TandemError
from runtime.logging import fields, get_logger
from runtime.pb import decode_pb2
from runtime.rpc import map_rpc_errors

CALL_TIMEOUT_S = 5.0
RETRY_DELAYS_S = (0.05, 0.2, 1.0)

logger = get_logger(__name__)


class TicketCloser:
    """Delivers CloseTicket calls in the background. Used on one event loop only."""

    def __init__(
        self, channels: ChannelCache, *, retry_delays_s: Sequence[float] = RETRY_DELAYS_S
    ) -> None:
        self._channels = channels
        self._retry_delays_s = tuple(retry_delays_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_dropped = 0
        """Messages that decode never got."""

    @property
    def num_pending(self) -> int:
        """Messages on their way."""
        return len(self._tasks)

    def close(self, address: str, request: decode_pb2.CloseTicketRequest) -> None:
        """Start delivering `request` to the decode rank at `address`."""
        task = asyncio.ensure_future(self._deliver(address, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def flush(self) -> None:
        """Return when every message is delivered or dropped."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _deliver(self, address: str, request: decode_pb2.CloseTicketRequest) -> None:
        for delay_s in (*self._retry_delays_s, None):
            try:
                await self._call(address, request)
                return
            except (PeerLostError, DeadlineExceededError) as error:
                if delay_s is None:
                    self._drop(address, request, error)
                    return
                await asyncio.sleep(delay_s)
            except TandemError as error:
                self._drop(address, request, error)
                return

    async def _call(self, address: str, request: decode_pb2.CloseTicketRequest) -> None:
        with map_rpc_errors(f"decode at {address}", request.request_id):
            response: decode_pb2.CloseTicketResponse = await self._channels.decode_stub(
                address
            ).CloseTicket(request, timeout=CALL_TIMEOUT_S)
        if response.HasField("error"):
            # Decode has forgotten the ticket: it restarted, or freed the blocks by other means.
            logger.info(
                "decode refused a closure %s",
                fields(request_id=request.request_id, reason=response.error.message),
            )

    def _drop(
        self, address: str, request: decode_pb2.CloseTicketRequest, error: TandemError
    ) -> None:
        self.num_dropped += 1
        logger.warning(
            "dropped a closure %s",
            fields(request_id=request.request_id, decode=address, error=error.message),
        )
