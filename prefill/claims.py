"""Claims from the first question to the computed prompt: asking decode for room, keeping it.

The engine loop wants a ticket when a request's turn is near; here the call waits for decode, and
the loop hears of its end. What decode may hold for us is known here: a call that was cut off, by us
or by the network, may have brought a ticket all the same, and whoever ends the request has to close
it. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.ticket import SendTicket
from prefill.messages import CancelRequest, ClaimFailed, Command, TicketClaimed
from prefill.peers import ClaimedTicket, PeerDirectory, RankAddress
from prefill.renewals import TicketRenewer
from prefill.request import Grant
from prefill.validation import check_ticket
from runtime.background import BackgroundTasks
from runtime.budget import Budget
from runtime.errors import DeadlineExceededError, InternalError, StaleTicketError, TandemError
from runtime.logging import fields, get_logger
from runtime.pb import decode_pb2
from runtime.trace.context import TraceContext, use_trace

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A request that decode is to be asked for.

    Attributes:
        request_id: the router's.
        reservation: its place at decode.
        num_context_tokens: what the ticket has to have blocks for.
        budget: the request's own time.
        trace: of the call of Run.
    """

    request_id: str
    reservation: decode_pb2.Reservation
    num_context_tokens: int
    budget: Budget
    trace: TraceContext | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Claim:
    decode: RankAddress
    task: asyncio.Task[None] | None = None
    is_refused: bool = False
    is_granted: bool = False


class Claims:
    """The claims of all live requests, by nonce."""

    def __init__(
        self,
        peers: PeerDirectory,
        renewer: TicketRenewer,
        submit: Callable[[Command], None],
        *,
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        """Start with none.

        Args:
            peers: decode ranks.
            renewer: of the tickets that were given.
            submit: hands a command to the engine loop.
            block_size: tokens of a block, here and in decode.
            clock: the engine loop's.
        """
        self._peers = peers
        self._renewer = renewer
        self._submit = submit
        self._block_size = block_size
        self._clock = clock
        self._claims: dict[int, _Claim] = {}
        self._tasks = BackgroundTasks()

    def __len__(self) -> int:
        return len(self._claims)

    def begin(self, wanted: Wanted) -> None:
        """Ask decode; the engine loop hears of the answer."""
        claim = _Claim(decode=RankAddress.of(wanted.reservation))
        self._claims[wanted.reservation.nonce] = claim
        with use_trace(wanted.trace):
            claim.task = self._tasks.start_for_request(
                self._ask(claim, wanted), name=f"claim of {wanted.request_id}"
            )

    def is_granted(self, nonce: int) -> bool:
        """Whether the engine loop was given a ticket, so that senders may know it."""
        claim = self._claims.get(nonce)
        return claim is not None and claim.is_granted

    def stop_renewing(self, nonce: int) -> None:
        """The prompt is computed, or will not be: now the time of the transfer runs."""
        claim = self._claims.get(nonce)
        if claim is not None:
            self._renewer.remove(claim.decode, nonce)

    def end(self, nonce: int) -> bool:
        """Ask no longer, and forget; whether decode may hold a ticket that has to be closed."""
        claim = self._claims.pop(nonce, None)
        if claim is None:
            return False
        self._renewer.remove(claim.decode, nonce)
        if claim.task is not None:
            claim.task.cancel()
        return not claim.is_refused

    async def close(self) -> None:
        """Cancel what is on its way."""
        for nonce in list(self._claims):
            self.end(nonce)
        await self._tasks.settle()
        await self._renewer.close()

    async def _ask(self, claim: _Claim, wanted: Wanted) -> None:
        nonce = wanted.reservation.nonce
        try:
            grant = await self._grant(claim, wanted)
        except TandemError as error:
            failure: TandemError = error
        except Exception as error:
            logger.exception("a claim failed %s", fields(request_id=wanted.request_id))
            failure = InternalError(f"{type(error).__name__}: {error}")
        else:
            claim.is_granted = True
            self._renewer.add(claim.decode, nonce, grant.ticket.timeout_s)
            self._submit(TicketClaimed(nonce, grant))
            return
        self._submit(ClaimFailed(nonce, failure))

    async def _grant(self, claim: _Claim, wanted: Wanted) -> Grant:
        left_s = wanted.budget.left(self._clock())
        try:
            answer = await self._peers.claim(wanted.request_id, wanted.reservation, left_s)
        except DeadlineExceededError:
            raise wanted.budget.error("waiting for room in decode", wanted.request_id) from None
        if isinstance(answer, TandemError):
            claim.is_refused = True
            raise answer
        check_ticket(answer.ticket, wanted.reservation, wanted.num_context_tokens, self._block_size)
        return grant_of(answer, self._block_size)


def grant_of(claimed: ClaimedTicket, block_size: int) -> Grant:
    """Decode's answer as the engine loop takes it."""
    ticket = claimed.ticket
    return Grant(
        ticket=SendTicket(
            request_id=ticket.request_id,
            nonce=ticket.nonce,
            epoch=ticket.decode.epoch,
            block_ids=tuple(ticket.block_ids),
            slot=ticket.metadata_slot,
            timeout_s=ticket.timeout_s,
            fence_generation=ticket.fence_generation,
        ),
        peer=claimed.peer,
        num_cached_blocks=ticket.num_cached_tokens // block_size,
    )


def cancel_of_unknown(nonce: int) -> CancelRequest:
    """What becomes of a request whose ticket decode does not know any more."""
    return CancelRequest(nonce, StaleTicketError("decode has given up the ticket: reserve again"))
