"""Requests that wait for a decode rank without room, while another one has room for them.

A reservation binds a request to one rank. Who waits for his prompt's turn while that rank has
claims that wait for blocks is shown to another rank, by tier, priority and age; the tokens of all
requests of this process that are on their way to a rank, and may not be in its reports yet, are
taken off its room, so that one free place does not draw a crowd. See
docs/adr/0012-room-elsewhere.md.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from router.pool.members import Role, WorkerKey
from router.pool.view import Candidate, PoolView
from router.routing.policy import NoWorkersError, Pair
from router.routing.request_shape import RequestShape
from runtime.tiers import NO_TIER, Standing

LOOK_S = 0.5
PATIENCE_S = 2.0
"""A rank without room for so long is left, where another has some: longer than reports take."""
PATIENCE_GROWTH = 4.0
"""By how much longer a request waits after each move: it must not swing between ranks."""


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """One attempt that waits for its prompt's turn, while it is entered."""

    capacity: SpareCapacity
    pair: Pair
    shape: Callable[[], RequestShape]
    patience_s: float
    num_tokens: int
    elsewhere: asyncio.Future[Pair]
    standing: Standing
    on_way_to: list[WorkerKey] = field(default_factory=list)
    blocked_since: float | None = None

    def __enter__(self) -> asyncio.Future[Pair]:
        self.capacity.enter(self)
        return self.elsewhere

    def __exit__(self, *_: object) -> None:
        self.capacity.leave(self)


class SpareCapacity:
    """All waiting requests of a router process. One event loop owns it."""

    def __init__(self, pool: PoolView, pick: Callable[[RequestShape], Pair]) -> None:
        """``pick``: the best pair for a request, or NoWorkersError."""
        self._pool = pool
        self._pick = pick
        self._waiting: dict[WaitingRequest, None] = {}  # in the order in which they came
        self._on_way: Counter[WorkerKey] = Counter()
        """Tokens of requests that may not be in a rank's reports yet."""
        self._timer: asyncio.TimerHandle | None = None

    def seek(
        self,
        pair: Pair,
        shape: Callable[[], RequestShape],
        patience_s: float,
        standing: Standing = NO_TIER,
        *,
        num_tokens: int,
    ) -> WaitingRequest:
        """While entered, look for room; the future is a pair that has some.

        Args:
            pair: whose decode rank may have none.
            shape: the request, and whom it must not be given to.
            patience_s: how long its rank must have no room before.
            standing: before whom it is looked after.
            num_tokens: that a rank has to have room for.
        """
        elsewhere: asyncio.Future[Pair] = asyncio.get_running_loop().create_future()
        return WaitingRequest(self, pair, shape, patience_s, num_tokens, elsewhere, standing)

    def enter(self, request: WaitingRequest) -> None:
        """It waits from now on."""
        self._waiting[request] = None
        self._send(request, request.pair.decode.key)
        self._look_later()

    def leave(self, request: WaitingRequest) -> None:
        """It waits no more."""
        del self._waiting[request]
        for key in request.on_way_to:
            self._on_way[key] -= request.num_tokens
            if not self._on_way[key]:
                del self._on_way[key]
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Show who has waited for long enough to a rank with room."""
        now = asyncio.get_running_loop().time()
        too_many: float | None = None
        for request in sorted(self._waiting, key=lambda each: each.standing.place):  # then by age
            if request.elsewhere.done() or not self._is_blocked(request, now):
                continue
            if too_many is not None and request.num_tokens >= too_many:
                continue  # nobody has room for fewer
            pair = self._with_room(request)
            if pair is None:
                too_many = request.num_tokens
            else:
                self._send(request, pair.decode.key)
                request.elsewhere.set_result(pair)

    def _is_blocked(self, request: WaitingRequest, now: float) -> bool:
        key = request.pair.decode.key
        is_there = self._pool.member(key) is not None  # else it is lost, and others say so
        if not is_there or not self._pool.reported_load(key).num_requests_blocked:
            request.blocked_since = None
            return False
        if request.blocked_since is None:
            request.blocked_since = now
        return now - request.blocked_since >= request.patience_s

    def _with_room(self, request: WaitingRequest) -> Pair | None:
        candidates = self._pool.candidates(Role.DECODE)
        full = {c.member.key for c in candidates if self._room(c) < request.num_tokens}
        full.add(request.pair.decode.key)
        if len(full) == len(candidates):
            return None
        shape = request.shape()
        shape = replace(
            shape,
            excluded=shape.excluded | full,
            preferred_prefill=request.pair.prefill.key,
        )
        try:
            return self._pick(shape)
        except NoWorkersError:
            return None

    def _room(self, candidate: Candidate) -> int:
        """Tokens that a decode rank could take at once, as far as it says."""
        report, member = candidate.load.report, candidate.member
        is_full = 0 < member.max_num_requests <= candidate.num_requests
        if is_full or report.num_requests_blocked:
            return 0
        return report.num_free_blocks * member.block_size - self._on_way[member.key]

    def _send(self, request: WaitingRequest, key: WorkerKey) -> None:
        request.on_way_to.append(key)
        self._on_way[key] += request.num_tokens

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_and_go_on)

    def _look_and_go_on(self) -> None:
        self._timer = None
        try:
            self.look()
        finally:
            self._look_later()
