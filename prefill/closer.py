"""Telling decode that we will write no more under a ticket: always, and a few times if need be.

Decode frees a request's blocks by these messages, so each is retried while decode is briefly out of
reach. What is due at one decode rank goes in one message: what comes together, and what comes while
a message is on its way. When decode stays out of reach it is dropped with a log line: a decode rank
that is gone has no blocks, and one that lives fences us after its own timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prefill.peers import ChannelCache, RankAddress
from runtime.background import BackgroundTasks
from runtime.errors import DeadlineExceededError, InternalError, PeerLostError, TandemError
from runtime.logging import fields, get_logger
from runtime.pb import common_pb2, decode_pb2
from runtime.rpc.grpc_calls import map_rpc_errors

CALL_TIMEOUT_S = 5.0
RETRY_DELAYS_S = (0.05, 0.2, 1.0)
LINGER_S = 0.002
"""So long a message waits for others to the same rank; decode holds blocks meanwhile."""
MAX_CLOSURES = 1000
"""Of one message: a few hundred bytes each, times ranks."""

logger = get_logger(__name__)


class TicketCloser:
    """Delivers CloseTickets calls in the background. Used on one event loop only."""

    def __init__(
        self, channels: ChannelCache, *, retry_delays_s: Sequence[float] = RETRY_DELAYS_S
    ) -> None:
        self._channels = channels
        self._retry_delays_s = tuple(retry_delays_s)
        self._due: dict[RankAddress, list[decode_pb2.TicketClosure]] = {}
        self._tasks = BackgroundTasks()
        self.num_pending = 0
        """Closures on their way."""
        self.num_dropped = 0
        """Closures that decode never got."""

    def close(
        self,
        decode: RankAddress,
        prefill: common_pb2.WorkerIdentity,
        closure: decode_pb2.TicketClosure,
    ) -> None:
        """Start delivering `closure` to a decode rank; `prefill` is our first rank."""
        self.num_pending += 1
        if decode in self._due:
            self._due[decode].append(closure)
            return
        self._due[decode] = [closure]
        self._tasks.start(self._deliver_all(decode, prefill), name=f"close at {decode.address}")

    async def flush(self) -> None:
        """Return when every closure is delivered or dropped."""
        await self._tasks.settle()

    async def _deliver_all(self, decode: RankAddress, prefill: common_pb2.WorkerIdentity) -> None:
        try:
            while self._due[decode]:
                await asyncio.sleep(LINGER_S)
                due = self._due[decode]
                closures, self._due[decode] = due[:MAX_CLOSURES], due[MAX_CLOSURES:]
                request = decode_pb2.CloseTicketsRequest(
                    prefill=prefill, decode_epoch=decode.epoch, closures=closures
                )
                try:
                    await self._deliver(decode.address, request)
                finally:
                    self.num_pending -= len(closures)
        finally:
            # Nothing is left here, unless the worker ends without waiting for us.
            self.num_pending -= len(self._due.pop(decode))

    async def _deliver(self, address: str, request: decode_pb2.CloseTicketsRequest) -> None:
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
            except Exception as error:
                logger.exception("a closing failed %s", fields(decode=address))
                self._drop(address, request, InternalError(f"{type(error).__name__}: {error}"))
                return

    async def _call(self, address: str, request: decode_pb2.CloseTicketsRequest) -> None:
        with map_rpc_errors(f"decode at {address}"):
            response: decode_pb2.CloseTicketsResponse = await self._channels.decode_stub(
                address
            ).CloseTickets(request, timeout=CALL_TIMEOUT_S)
        if response.HasField("error"):
            # Decode has forgotten the tickets: it restarted, or freed the blocks by other means.
            logger.info(
                "decode refused closures %s",
                fields(num_tickets=len(request.closures), reason=response.error.message),
            )

    def _drop(
        self, address: str, request: decode_pb2.CloseTicketsRequest, error: TandemError
    ) -> None:
        self.num_dropped += len(request.closures)
        for closure in request.closures:
            logger.warning(
                "dropped a closure %s",
                fields(request_id=closure.request_id, decode=address, error=error.message),
            )
