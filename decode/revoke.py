"""Getting the blocks of cancelled tickets back: ask the writer to stop, else shut it out.

The gentle way is Prefill.Revoke: its answer says that no rank of the writer writes under the nonce
any more. If the writer is dead, silent, or another life of itself, its connections are fenced,
which fails whatever else it was sending here; so that is done only when asking did not help.
Fencing blocks for milliseconds: it runs on a thread of its own, neither on the event loop nor on
the engine loop.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import grpc.aio

from decode.live import WriterOrder
from decode.requests import Writer
from decode.tickets import WriterDemand
from runtime.background import BackgroundTasks
from runtime.errors import TandemError
from runtime.logging import fields, get_logger
from runtime.net.credentials import Credentials
from runtime.net.roles import Role
from runtime.pb import common_pb2, prefill_pb2, prefill_pb2_grpc
from runtime.rpc.grpc_calls import map_rpc_errors, open_channel
from runtime.rpc.wire import identity

logger = get_logger(__name__)

REMEMBER_FACTOR = 2.0
"""The writer refuses a revoked nonce for so many times the life of a ticket."""


class TicketBooks(Protocol):
    """The tickets, reached through the engine loop."""

    async def drained(self, nonce: int) -> None:
        """The writer has drained."""

    async def needs_fence(self, nonce: int) -> bool:
        """Whether the allocation is still in quarantine."""
        ...

    async def nonces_of(self, writer: Writer) -> Sequence[int]:
        """Tickets that a fence of the writer which starts now will settle."""
        ...

    async def fenced(self, nonces: Sequence[int]) -> None:
        """The writer was shut out."""

    async def due_for_fence(self) -> set[Writer]:
        """Writers of allocations that waited for too long."""
        ...


CallRevoke = Callable[[str, prefill_pb2.RevokeRequest, float], Awaitable[bool]]
"""(address, request, timeout in seconds) -> drained; raises TandemError."""


MAX_CHANNELS = 256
"""More than prefill workers that live at once."""


class RevokeCalls:
    """The RPC to any prefill worker, over one channel each."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        """By address, the latest used last. Each life of a worker has an address of its own."""

    async def __call__(
        self, address: str, request: prefill_pb2.RevokeRequest, timeout_s: float
    ) -> bool:
        """See `CallRevoke`."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(
                address, self._credentials, Role.PREFILL
            )
        self._channels.move_to_end(address)
        if len(self._channels) > MAX_CHANNELS:
            _, oldest = self._channels.popitem(last=False)
            await oldest.close(None)
        with map_rpc_errors(f"prefill worker at {address}", request.request_id):
            stub = prefill_pb2_grpc.PrefillStub(channel)
            response: prefill_pb2.RevokeResponse = await stub.Revoke(request, timeout=timeout_s)
        return response.drained

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close(None)


class Revoker:
    """Runs the orders of a rank in the background. Used on the event loop only."""

    def __init__(
        self,
        books: TicketBooks,
        call_revoke: CallRevoke,
        fence: Callable[[str, str], None],
        *,
        decode: common_pb2.WorkerIdentity,
        ticket_timeout_s: float,
        quarantine_timeout_s: float,
    ) -> None:
        """Start no task yet.

        Args:
            books: the rank's tickets.
            call_revoke: the RPC.
            fence: `Fences.fence`, by the keys of writer and rank; blocks.
            decode: who we are.
            ticket_timeout_s: life of a ticket.
            quarantine_timeout_s: how long a writer may take to answer.
        """
        self._books = books
        self._call_revoke = call_revoke
        self._fence_peer = fence
        self._decode = decode
        self._ticket_timeout_s = ticket_timeout_s
        self._quarantine_timeout_s = quarantine_timeout_s
        self._locks: weakref.WeakValueDictionary[Writer, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._being_fenced: set[Writer] = set()
        """By a sweep; one that cannot be shut out takes seconds a try."""
        self._tasks = BackgroundTasks()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="fence")

    @property
    def num_pending(self) -> int:
        """Orders under way."""
        return len(self._tasks)

    def order(self, order: WriterOrder) -> None:
        """Start getting one allocation back."""
        self._start(self._carry_out(order))

    async def sweep(self) -> None:
        """Start fencing the writers that are due; call it about once a second."""
        for writer in await self._books.due_for_fence() - self._being_fenced:
            self._being_fenced.add(writer)
            self._start(self._fence_due(writer))

    async def close(self) -> None:
        """Cancel what is under way. The transport is about to close, which fences everybody."""
        await self._tasks.close()
        self._threads.shutdown(wait=True)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.start(work, name="revoker")

    async def _carry_out(self, order: WriterOrder) -> None:
        if order.demand is WriterDemand.REVOKE and await self._revoke(order):
            await self._books.drained(order.nonce)
            return
        await self._fence(order.writer, order.nonce)

    async def _revoke(self, order: WriterOrder) -> bool:
        """Whether the writer says that it is done."""
        writer = order.writer
        request = prefill_pb2.RevokeRequest(
            request_id=order.request_id,
            nonce=order.nonce,
            decode=self._decode,
            remember_s=REMEMBER_FACTOR * self._ticket_timeout_s,
            prefill=identity(writer.instance, writer.epoch, writer.rank),
        )
        try:
            return await self._call_revoke(writer.address, request, self._quarantine_timeout_s)
        except TandemError as error:
            logger.warning(
                "cannot revoke %s",
                fields(request_id=order.request_id, writer=writer.instance, error=error.message),
            )
            return False

    async def _fence_due(self, writer: Writer) -> None:
        try:
            if writer in await self._books.due_for_fence():
                await self._fence(writer, None)
        finally:
            self._being_fenced.discard(writer)

    async def _fence(self, writer: Writer, nonce: int | None) -> None:
        """Shut out all ranks of a writer, unless another fence has freed `nonce` meanwhile."""
        lock = self._locks.setdefault(writer, asyncio.Lock())
        async with lock:
            if nonce is not None and not await self._books.needs_fence(nonce):
                return
            nonces = await self._books.nonces_of(writer)
            if not nonces:
                return
            logger.warning("shutting out %s", fields(writer=writer.key))
            loop = asyncio.get_running_loop()
            for peer in writer.peers:
                try:
                    await loop.run_in_executor(self._threads, self._fence_peer, writer.key, peer)
                except TandemError as error:
                    # The blocks stay in quarantine; the next sweep tries again.
                    logger.error("cannot shut out %s: %s", peer, error.message)
                    return
            await self._books.fenced(nonces)
