"""The rank as the event loop sees it: every call becomes a command of the engine loop.

Nothing here waits while holding anything. A command that changes something is awaited where its
outcome matters, and left to itself where it does not; after the end of the engine loop both kinds
find nothing to do, or raise DrainingError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from decode.loop import EngineLoop
from decode.rank import DecodeRank
from decode.requests import DecodeRequest, Writer
from kv_transfer.receiver import Arrival
from runtime.errors import TandemError
from runtime.pb import decode_pb2

ResultT = TypeVar("ResultT")


class RankBridge:
    """Commands to one rank; `arrived` may be called from any thread, the rest on the event loop."""

    def __init__(self, loop: EngineLoop, rank: DecodeRank) -> None:
        self._loop = loop
        self._rank = rank

    def reserve(self, request: DecodeRequest) -> None:
        """Take a request on; all answers go to `request.tell`.

        Raises:
            DrainingError: the loop is over.
        """
        future = self._loop.submit(lambda: self._rank.reserve(request))
        if future.done():
            future.result()

    def abort_reservation(self, request: DecodeRequest, error: TandemError) -> None:
        """End this request if it is still alive."""
        self._loop.submit(lambda: self._rank.live.abort_reservation(request, error))

    def abort_router(self, router_id: str) -> None:
        """End all requests of a router that is gone."""
        self._loop.submit(lambda: self._rank.live.abort_router(router_id))

    def arrived(self, arrival: Arrival) -> None:
        """The receiver saw the last part of an allocation."""
        self._loop.submit(lambda: self._rank.arrived(arrival))

    async def abort(self, request_id: str, error: TandemError) -> bool:
        """End a request; whether it was alive."""
        return await self._call(lambda: self._rank.live.abort(request_id, error))

    async def close_ticket(
        self, message: decode_pb2.CloseTicketRequest, failure: TandemError
    ) -> None:
        """A part closes its ticket.

        Raises:
            StaleTicketError: the ticket is not known.
        """
        await self._call(lambda: self._rank.close_ticket(message, failure))

    async def num_live(self) -> int:
        """Requests that are not answered yet."""
        return await self._call(lambda: len(self._rank.live))

    async def is_empty(self) -> bool:
        """Whether nothing is left, neither a request nor a block in quarantine."""
        return await self._call(lambda: self._rank.is_empty)

    async def check_integrity(self) -> None:
        """Raise InternalError unless the books agree; that also ends the loop."""
        await self._call(self._rank.check_integrity)

    async def drained(self, nonce: int) -> None:
        """The writer has drained."""
        await self._call(lambda: self._rank.drained(nonce))

    async def needs_fence(self, nonce: int) -> bool:
        """Whether the allocation is still in quarantine."""
        return await self._call(lambda: self._rank.desk.needs_fence(nonce))

    async def nonces_of(self, writer: Writer) -> Sequence[int]:
        """Tickets that a fence of the writer which starts now will settle."""
        return await self._call(lambda: self._rank.desk.nonces_of(writer))

    async def fenced(self, nonces: Sequence[int]) -> None:
        """The writer was shut out."""
        await self._call(lambda: self._rank.fenced(nonces))

    async def due_for_fence(self) -> set[Writer]:
        """Writers of allocations that waited for too long."""
        return await self._call(self._rank.desk.due_for_fence)

    async def _call(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.wrap_future(self._loop.submit(work))
