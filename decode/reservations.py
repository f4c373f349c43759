"""The reservation desk: refuses what can never run, queues the rest, and issues tickets in turn.

`admission` decides who is next; this file knows what a ticket costs now, keeps room for the
expected growth of those that are in, and tells each waiting caller its position when it changes.
Nobody is let in while a preempted request waits to come back. Used by the engine loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from decode.admission import AdmissionQueue, GrowthEstimator
from decode.requests import DecodeRequest, QueuedUpdate
from decode.tickets import TicketDesk
from engine.memory.block_pool import BlockPool
from engine.request import num_blocks_for
from runtime.errors import InvalidRequestError, OutOfBlocksError, OverloadedError, TandemError
from runtime.lifecycle import DecodeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimits:
    """What one rank takes on."""

    max_model_len: int
    """Tokens of prompt and output together."""
    max_num_reserved: int
    """Most live requests; one more is rejected as overload."""
    transfer_timeout_s: float
    """From a ticket to its complete KV."""


class Reservations:
    """Requests in RESERVED, and the way out of it."""

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
        self._queue = AdmissionQueue()
        self._told: dict[str, int] = {}  # request id -> position
        self._blocked_at: tuple[int, int] | None = None  # budget and length of the queue

    def __len__(self) -> int:
        return len(self._queue)

    def refusal(self, request: DecodeRequest, live: Collection[str]) -> TandemError | None:
        """Why the request cannot be taken on, now or ever; None if it can.

        Args:
            request: just received.
            live: ids of all live requests.
        """
        inner, limits = request.request, self._limits
        num_blocks = num_blocks_for(inner.num_prompt_tokens + 1, self._pool.block_size)
        if request.request_id in live:
            return InvalidRequestError(f"request id {request.request_id} is in use")
        if inner.num_prompt_tokens + 1 > limits.max_model_len:
            return InvalidRequestError(
                f"the prompt has {inner.num_prompt_tokens} tokens and max_model_len is "
                f"{limits.max_model_len}: shorten it to at most {limits.max_model_len - 1}"
            )
        if num_blocks > self._pool.num_usable_blocks:
            return OutOfBlocksError(
                f"the prompt of {inner.num_prompt_tokens} tokens needs {num_blocks} KV blocks and "
                f"this rank has {self._pool.num_usable_blocks}: it can never fit. Shorten it, or "
                "raise decode.num_blocks"
            )
        if len(live) >= limits.max_num_reserved:
            return OverloadedError(
                f"{len(live)} requests are here already (decode.max_num_reserved): retry later"
            )
        return None

    def add(self, request: DecodeRequest) -> None:
        """Queue a request."""
        self._queue.push(request)
        self._blocked_at = None

    def remove(self, request: DecodeRequest) -> None:
        """Take out a request that ends while it waits."""
        self._queue.remove(request)
        self._told.pop(request.request_id, None)

    def wake(self) -> None:
        """Something was freed or cached: look again at the next `admit`."""
        self._blocked_at = None

    def admit(self, holders: Collection[DecodeRequest], *, is_open: bool) -> None:
        """Issue tickets while they fit, then tell the others where they stand.

        Args:
            holders: live requests that hold blocks, or will again.
            is_open: whether anybody may be let in.
        """
        if not len(self._queue):
            return
        headroom = sum(self._growth.expected_blocks(item.request) for item in holders)
        num_holders = len(holders)
        while is_open and len(self._queue) and self._desk.has_free_slot:
            # With nobody else in, the whole pool is there for one request.
            budget = self._pool.num_free_blocks - headroom
            state = (budget, len(self._queue))
            if state == self._blocked_at:
                break
            request = self._queue.pick(self._cost(alone=num_holders == 0), budget)
            if request is None:
                self._blocked_at = state
                break
            self._issue(request)
            headroom += self._growth.expected_blocks(request.request)
            num_holders += 1
        self._tell_positions()

    def _cost(self, *, alone: bool) -> Callable[[DecodeRequest], int]:
        def cost(request: DecodeRequest) -> int:
            growth = 0 if alone else self._growth.expected_blocks(request.request)
            return self._desk.num_blocks_to_take(request) + growth

        return cost

    def _issue(self, request: DecodeRequest) -> None:
        self._told.pop(request.request_id, None)
        now = self._clock()
        update = self._desk.open(request, self._limits.transfer_timeout_s)
        request.move_to(DecodeStatus.WAITING_FOR_KV)
        request.transfer_deadline = now + self._limits.transfer_timeout_s
        request.allocated_at = now
        request.timings.decode_reserve_s = now - request.received_at
        request.tell(update)

    def _tell_positions(self) -> None:
        for position, request in enumerate(self._queue):
            if self._told.get(request.request_id) != position:
                self._told[request.request_id] = position
                num_free = self._pool.num_free_blocks
                reason = f"{num_free} of {self._pool.num_usable_blocks} KV blocks are free"
                request.tell(QueuedUpdate(position=position, reason=reason))
