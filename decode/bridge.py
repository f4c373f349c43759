"""The rank as the event loop sees it: every call becomes a command of the engine loop.

Nothing here waits while holding anything. A command that changes something is awaited where its
outcome matters, and left to itself where it does not; whoever stops waiting for one does not take
it back. After the end of the engine loop both kinds find nothing to do, or raise DrainingError.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from decode.loop import EngineLoop
from decode.rank import DecodeRank
from decode.requests import Claim, ClaimUpdate, DecodeRequest, RejectedUpdate, TicketUpdate, Writer
from grammar.constraints import AnyMatcher
from kv_transfer.receiver import Arrival
from runtime.errors import DrainingError, TandemError
from runtime.logging import get_logger
from runtime.pb import decode_pb2

logger = get_logger(__name__)

ResultT = TypeVar("ResultT")


class RankBridge:
    """Commands to one rank; `arrived` may be called from any thread, the rest on the event loop."""

    def __init__(self, loop: EngineLoop, rank: DecodeRank) -> None:
        self._loop = loop
        self._rank = rank

    def reserve(self, request: DecodeRequest) -> None:
        """Take a request on; what becomes of it is told by its claim and by its deltas.

        Raises:
            DrainingError: the loop is over.
        """
        future = self._send(lambda: self._rank.reserve(request))
        if future.done():
            future.result()

    def match(self, request: DecodeRequest, making: Future[AnyMatcher | None]) -> None:
        """Give a request that is reserved its matcher, or end it, once `making` is done."""
        making.add_done_callback(lambda done: self._send(lambda: self._rank.matched(request, done)))

    async def claim(self, make: Callable[[Callable[[ClaimUpdate], None]], Claim]) -> TicketUpdate:
        """Wait for the ticket of a reservation; cancelling gives back what it got.

        Args:
            make: the claim whose answer goes to the given function.

        Raises:
            TandemError: what `make` raises; the nonce is not known; the request is over.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[ClaimUpdate] = loop.create_future()

        def tell(update: ClaimUpdate) -> None:
            # The event loop may be gone when the engine loop answers what is left at shutdown.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_set_once, answer, update)

        claim = make(tell)
        try:
            await self._call(lambda: self._rank.claim(claim))
            update = await answer
        except asyncio.CancelledError:
            self._send(lambda: self._rank.unclaim(claim))
            raise
        if isinstance(update, RejectedUpdate):
            raise update.error.of(update.error.request_id)
        return update

    async def renew(self, nonces: Sequence[int], writer_key: str) -> list[int]:
        """Start the transfer time of tickets anew; those that nothing waits for any more."""
        return await self._call(lambda: self._rank.renew(nonces, writer_key))

    def abort_router(self, router_id: str) -> None:
        """End all requests of a router that is gone."""
        self._send(lambda: self._rank.live.abort_router(router_id))

    def abort_soon(self, request_id: str, error: TandemError) -> None:
        """End a request; nobody waits for it."""
        self._send(lambda: self._rank.live.abort(request_id, error))

    def arrived(self, arrival: Arrival) -> None:
        """The receiver saw the last part of an allocation."""
        self._send(lambda: self._rank.hand_over.arrived(arrival))

    async def abort(
        self, request_id: str, error: TandemError, *, only_without_ticket: bool = False
    ) -> bool:
        """End a request, or only one that has no ticket; whether it did."""
        return await self._call(
            lambda: self._rank.live.abort(
                request_id, error, only_without_ticket=only_without_ticket
            )
        )

    async def close_tickets(self, message: decode_pb2.CloseTicketsRequest) -> list[int]:
        """Parts close their tickets; the nonces that are not ours."""
        return await self._call(lambda: self._rank.hand_over.close_tickets(message))

    async def start_drain(self, deadline_s: float, error: TandemError) -> None:
        """Give back what holds nothing now, and the rest with `error` after so many seconds."""
        await self._call(lambda: self._rank.start_drain(deadline_s, error))

    async def num_live(self) -> tuple[int, int]:
        """Requests that are not answered yet, and tokens that they may still generate, at most."""
        live = self._rank.live
        return await self._call(lambda: (len(live), live.num_tokens_left))

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
        # A handler that is cancelled, because its caller would not wait for a long step, must not
        # take its command along: the caller has no other way to have it done.
        return await asyncio.shield(asyncio.wrap_future(self._loop.submit(work)))

    def _send(self, work: Callable[[], object]) -> Future[object]:
        """Submit a command that nobody waits for."""
        future = self._loop.submit(work)
        future.add_done_callback(_log_failure)
        return future


def _log_failure(future: Future[object]) -> None:
    error = future.exception()
    if error is not None and not isinstance(error, DrainingError):
        logger.error("a command failed: %s: %s", type(error).__name__, error)


def _set_once(answer: asyncio.Future[ClaimUpdate], update: ClaimUpdate) -> None:
    if not answer.done():
        answer.set_result(update)
