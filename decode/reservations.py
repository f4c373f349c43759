"""The reservation desk: keeps places, queues what was claimed, and issues tickets in turn.

A reservation holds a place and nothing else until its prefill worker claims it. `admission` decides
who of the claimed is next; this file knows what a ticket costs now, and keeps room for the expected
growth of those that are in. Nobody is let in while a preempted request of his tier, or of one
before it, waits to come back. Used by the engine loop's thread.

A claim that is cancelled before its answer gives back what it got. Queued, the request is RESERVED
again, and may be claimed anew. With a ticket that nobody else was told of, it ends: whether the
caller saw the ticket is not known, and a nonce names one allocation only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from decode.admission import AdmissionQueue, GrowthEstimator
from decode.requests import Claim, DecodeRequest, RejectedUpdate
from decode.tickets import TicketDesk
from engine.memory.block_pool import BlockPool
from runtime.budget import Budget, BudgetKind
from runtime.errors import StaleTicketError, TandemError
from runtime.logging import fields, get_logger
from worker.lifecycle import DecodeStatus

logger = get_logger(__name__)

_MAX_ENDED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimits:
    """What one rank takes on."""

    max_model_len: int
    """Tokens of prompt and output together."""
    transfer_timeout_s: float
    """From a ticket, or its last renewal, to complete KV."""
    vocab_size: int
    """Token ids are below it."""


class Reservations:
    """Requests in RESERVED and CLAIMED, and the way out."""

    def __init__(
        self,
        pool: BlockPool,
        desk: TicketDesk,
        growth: GrowthEstimator,
        limits: RankLimits,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._desk = desk
        self._growth = growth
        self._limits = limits
        self._clock = clock
        self._requests: dict[int, DecodeRequest] = {}  # by nonce
        self._queue = AdmissionQueue()
        self._ended: OrderedDict[int, TandemError] = OrderedDict()  # by nonce
        self._blocked_at: tuple[int, int, int] | None = None
        """Blocks, length of the queue, and first tier that waits to come back, at the last look."""

    @property
    def num_reserved(self) -> int:
        """Requests that nobody claims."""
        return len(self._requests) - len(self._queue)

    @property
    def num_claimed(self) -> int:
        """Requests that are queued for blocks."""
        return len(self._queue)

    @property
    def requests(self) -> list[DecodeRequest]:
        """All of both states."""
        return list(self._requests.values())

    def add(self, request: DecodeRequest) -> None:
        """Keep a place for a request in RESERVED."""
        self._requests[request.nonce] = request

    def check(self, claim: Claim) -> None:
        """Look whether it can be had; changes nothing.

        Raises:
            StaleTicketError: the nonce is not of a request that waits for its KV, or did until its
                end, and of this writer: it was never given out here, was used, or is forgotten.
        """
        if claim.nonce in self._ended:
            return
        request = self._find(claim.nonce)
        if request is None:
            raise StaleTicketError(
                f"nothing here waits under nonce {claim.nonce:#x}: it was used, or is of another "
                "worker"
            )
        writer = request.writer
        if (writer.key, writer.num_ranks) != (claim.writer_key, claim.num_ranks):
            raise StaleTicketError(
                f"nonce {claim.nonce:#x} is for {writer.key} with {writer.num_ranks} ranks, not "
                f"for {claim.writer_key} with {claim.num_ranks}",
                request_id=request.request_id,
            )

    def claim(self, claim: Claim) -> None:
        """Queue the request that is claimed; one that has its ticket, or is over, is told so again.

        Args:
            claim: has passed `check`.
        """
        error = self._ended.get(claim.nonce)
        if error is not None:
            # Told and not raised: whatever it is, it is nothing that this command has broken.
            claim.tell(RejectedUpdate(error=error))
            return
        ticket = self._desk.usable_ticket(claim.nonce)
        request = self._requests[claim.nonce] if ticket is None else ticket.request
        request.claims.append(claim)
        if ticket is not None:
            request.transfer = self._transfer_budget()
            claim.tell(ticket.update)
        elif request.status is DecodeStatus.RESERVED:
            request.move_to(DecodeStatus.CLAIMED)
            request.claimed_at = self._clock()
            self._queue.push(request)
            self._blocked_at = None

    def unclaim(self, claim: Claim) -> DecodeRequest | None:
        """The call is cancelled, and may not have been answered.

        Returns:
            The request, if it must end: its ticket went into this call and into no other.
        """
        request = self._find(claim.nonce)
        if request is None or claim not in request.claims:
            return None
        request.claims.remove(claim)
        if request.claims:
            return None
        if request.status is DecodeStatus.WAITING_FOR_KV:
            return request
        self._queue.remove(request)
        request.move_to(DecodeStatus.RESERVED)
        return None

    def renew(self, nonces: Iterable[int], writer_key: str) -> list[int]:
        """Start the transfer time of these tickets anew; those that nothing waits for any more."""
        unknown: list[int] = []
        for nonce in nonces:
            request = self._find(nonce)
            if request is None or request.writer.key != writer_key:
                unknown.append(nonce)
            elif request.transfer is not None:
                request.transfer = request.transfer.restarted(self._clock())
        return unknown

    def remove(self, request: DecodeRequest) -> None:
        """Take out a request that ends while it waits."""
        if request.status is DecodeStatus.CLAIMED:
            self._queue.remove(request)
        del self._requests[request.nonce]

    def remember(self, nonce: int, error: TandemError) -> None:
        """Tell later claims what the request ended with."""
        self._ended[nonce] = error
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def wake(self) -> None:
        """Something was freed or cached: look again at the next `admit`."""
        self._blocked_at = None

    def admit(
        self, holders: Collection[DecodeRequest], *, away: Sequence[DecodeRequest] = ()
    ) -> list[tuple[DecodeRequest, Exception]]:
        """Issue tickets while they fit.

        Args:
            holders: live requests that hold blocks, or will again.
            away: requests that wait to come back, in order; nobody of their tiers, or of one
                behind, is let in.

        Returns:
            Requests that must end, because their tickets could not be issued.
        """
        failed: list[tuple[DecodeRequest, Exception]] = []
        headroom = sum(self._growth.expected_blocks(item.request) for item in holders)
        num_holders = len(holders)
        before = away[0].standing.order if away else -1
        while len(self._queue) and self._desk.has_free_slot:
            # With nobody else in, the whole pool is there for one request.
            budget = self._pool.num_free_blocks - headroom
            state = (budget, len(self._queue), before)
            if state == self._blocked_at:
                break
            request = self._queue.pick(self._cost(alone=num_holders == 0), budget, away)
            if request is None:
                self._blocked_at = state
                break
            try:
                self._issue(request)
            except Exception as error:
                # `open` leaves everything as it was: nobody else is touched.
                logger.exception("no ticket %s", fields(request_id=request.request_id))
                self._queue.push(request)
                failed.append((request, error))
                break
            headroom += self._growth.expected_blocks(request.request)
            num_holders += 1
        return failed

    def _find(self, nonce: int) -> DecodeRequest | None:
        """The request that waits for a ticket, or under one."""
        ticket = self._desk.usable_ticket(nonce)
        return self._requests.get(nonce) if ticket is None else ticket.request

    def _cost(self, *, alone: bool) -> Callable[[DecodeRequest], int]:
        def cost(request: DecodeRequest) -> int:
            growth = 0 if alone else self._growth.expected_blocks(request.request)
            return self._desk.num_blocks_to_take(request) + growth

        return cost

    def _issue(self, request: DecodeRequest) -> None:
        update = self._desk.open(request, self._limits.transfer_timeout_s)
        del self._requests[request.nonce]
        request.move_to(DecodeStatus.WAITING_FOR_KV)
        request.transfer = self._transfer_budget()
        request.allocated_at = self._clock()
        request.timings.decode_reserve_s = request.allocated_at - request.claimed_at
        request.tell_claims(update)

    def _transfer_budget(self) -> Budget:
        timeout_s = self._limits.transfer_timeout_s
        setting = "kv_transfer.transfer_timeout_s"
        return Budget.start(BudgetKind.TRANSFER, timeout_s, self._clock(), setting)
