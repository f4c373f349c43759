"""How many choices may be in flight at once, and the queue of requests that wait for their turn.

Requests wait here first in, first out, for as long as ``router.queue_timeout_s`` and with bodies of
at most ``router.max_queue_bytes`` together; beyond either, one is answered 429. The limit follows
what decode can hold, so that workers are never asked for more than they have; tokens are made only
for a request that has a place. Some of it is held back: a request that was aborted leaves its place
here before its place in decode. An HTTP request is admitted whole: one with many choices may pass
the limit by those that it runs at once, but is never refused halfway.

With tiers of service the order is that of ``WaitingLine``. Places are held for as long as an answer
takes, so a request of a tier before the last that would miss its target for the first token is let
into part of what is held back; nobody's place is ever kept empty for somebody who may come. Where
bodies take too much memory, the latest requests of the last tier in order make room.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from router.errors import TooManyRequestsError
from router.keys.line import WaitingLine
from router.pool.members import Member
from router.requests.pace import Pace
from runtime.budget import Budget, BudgetKind, earliest
from runtime.errors import DrainingError
from runtime.tiers import NO_TIER, Standing

QUEUE_TIMEOUT_S = 900.0
MAX_QUEUE_BYTES = 256 * 2**20
SMALL_BODY_BYTES = 64 * 2**10
"""A body of up to this size is read however many bytes of others are: connections bound those."""

LET_IN_SHARE = 0.75
"""Of what decode takes on. The rest is for requests that end in decode a moment later than here,
and for one with many choices that passes the limit."""
URGENT_SHARE = 0.9
"""The same for requests of a tier before the last that would miss their target otherwise."""
WAIT_SHARE = 0.5
"""Of that target, what a request may wait here: workers need the rest."""
REQUESTS_OF_SILENT_RANK = 128
"""Of a decode rank that does not say how many it takes on."""
MAX_RETRY_AFTER_S = 60.0


def limit_of(decodes: Iterable[Member], num_processes: int, share: float = LET_IN_SHARE) -> int:
    """Choices that one of ``num_processes`` lets in, for these decode ranks; 0 without any.

    ``share`` is of what the ranks take on. Where a rank is in the pools of several routers, each
    lets in its part.
    """
    shares = [
        (rank.max_num_requests or REQUESTS_OF_SILENT_RANK) / rank.num_routers for rank in decodes
    ]
    return math.ceil(share * sum(shares) / num_processes)


Limits = Callable[[], Collection[Budget]]
"""A request's own, made where it has to wait."""


class Place:
    """A request's place in flight; may be given back before its answer is out."""

    def __init__(self, admission: Admission, num_choices: int, standing: Standing) -> None:
        self._admission = admission
        self._num_choices = num_choices
        self._standing = standing

    async def take(self, limits: Limits, num_bytes: int) -> None:
        """Wait for it; to be called once."""
        await self._admission.wait_for_place(self._num_choices, self._standing, limits, num_bytes)

    def give_back(self) -> None:
        """Let the next request in; idempotent."""
        num_choices, self._num_choices = self._num_choices, 0
        if num_choices:
            self._admission.release(num_choices, self._standing)


class Entry:
    """An async context: a place is waited for, held, and given back at the latest at the end."""

    __slots__ = ("_limits", "_num_bytes", "_place")

    def __init__(self, place: Place, limits: Limits, num_bytes: int) -> None:
        self._place = place
        self._limits = limits
        self._num_bytes = num_bytes

    async def __aenter__(self) -> Place:
        await self._place.take(self._limits, self._num_bytes)
        return self._place

    async def __aexit__(self, *_: object) -> None:
        self._place.give_back()


class BodyBudget:
    """Bytes of bodies that are read or wait, whichever model they are for."""

    def __init__(self, max_bytes: int = MAX_QUEUE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0


class BodyBytes:
    """What one body takes of the memory for bodies that are read or wait; a context."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.num_bytes = 0

    def __enter__(self) -> BodyBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def add(self, num_bytes: int) -> None:
        """More of it was read.

        Raises:
            TooManyRequestsError: all bodies together are too large, and this one is not small.
        """
        self._admission.count_body(num_bytes)
        self.num_bytes += num_bytes
        if self.num_bytes > SMALL_BODY_BYTES:
            self._admission.check_body_bytes()

    def release(self) -> None:
        """It waits no more; idempotent."""
        self._admission.count_body(-self.num_bytes)
        self.num_bytes = 0


class _Waiter:
    """One request in the queue."""

    def __init__(self, num_choices: int, standing: Standing, num_bytes: int) -> None:
        self.num_choices = num_choices
        self.standing = standing
        self.num_bytes = num_bytes
        loop = asyncio.get_running_loop()
        self.since = loop.time()
        self.turn: asyncio.Future[None] = loop.create_future()

    @property
    def has_place(self) -> bool:
        return self.turn.done() and not self.turn.cancelled() and self.turn.exception() is None


class Admission:
    """Counts what is in flight and what waits. One event loop owns it."""

    def __init__(
        self,
        limit: int,
        *,
        queue_timeout_s: float = QUEUE_TIMEOUT_S,
        max_queue_bytes: int = MAX_QUEUE_BYTES,
        bodies: BodyBudget | None = None,
        last_order: int = 0,
        on_refused: Callable[[Standing], None] = lambda standing: None,
    ) -> None:
        """``limit``: concurrent requests, each of n choices counted; ``set_limit`` changes it.

        ``bodies`` are those of several admissions together, in the place of ``max_queue_bytes``.
        ``last_order`` is that of the last tier in order; ``on_refused`` is told of requests that
        were to wait and are answered 429.
        """
        self._limit = self._urgent_limit = limit
        self._last_order = last_order
        self._on_refused = on_refused
        self._queue_timeout_s = queue_timeout_s
        self._bodies = bodies or BodyBudget(max_queue_bytes)
        self._num_in_flight = 0
        self._in_flight: Counter[str] = Counter()
        """The same by the names of tiers."""
        self._draining = False
        self._line = WaitingLine[_Waiter]()
        self._pace = Pace()

    @property
    def limit(self) -> int:
        """Choices that may be in flight."""
        return self._limit

    @property
    def num_in_flight(self) -> int:
        """Choices of the requests that have a place."""
        return self._num_in_flight

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._line)

    def num_waiting_by_tier(self) -> Counter[str]:
        """The same by the names of tiers; those of no tier under ""."""
        return self._line.counts()

    def num_in_flight_by_tier(self) -> Counter[str]:
        """Choices of the requests that have a place, by the names of tiers; "" as above."""
        return +self._in_flight

    @property
    def oldest_wait_s(self) -> float:
        """How long the oldest of them has waited; 0 where nobody does."""
        first = next(iter(self._line), None)
        return asyncio.get_running_loop().time() - first.since if first is not None else 0.0

    @property
    def body_bytes(self) -> int:
        """Of bodies that are being read or wait."""
        return self._bodies.num_bytes

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the process is about to end."""
        return self._draining

    def set_limit(self, limit: int, urgent_limit: int = 0) -> None:
        """What the workers can hold has changed.

        ``urgent_limit``: the limit for requests that would miss their tier's target, if it is more.
        """
        self._limit, self._urgent_limit = limit, max(limit, urgent_limit)
        self._let_in()

    def drain(self) -> None:
        """Admit nothing from now on; who waits is told so."""
        self._draining = True
        for waiter in self._line:
            if not waiter.turn.done():
                waiter.turn.set_exception(_draining())

    def admit(
        self,
        num_choices: int,
        limits: Limits = tuple,
        *,
        standing: Standing = NO_TIER,
        num_bytes: int = 0,
    ) -> Entry:
        """Wait for a place for one HTTP request that runs ``num_choices`` at once, and hold it.

        ``limits`` are the request's own; its body has ``num_bytes``. Entering the result waits, and
        raises what ``wait_for_place`` does.
        """
        return Entry(Place(self, num_choices, standing), limits, num_bytes)

    async def wait_for_place(
        self, num_choices: int, standing: Standing, limits: Limits, num_bytes: int
    ) -> None:
        """Count ``num_choices`` as in flight when it is their turn.

        Raises:
            TooManyRequestsError: none was free in time, or too much waits already.
            DeadlineExceededError: a limit of the request's own was over before.
            DrainingError: the process is about to end.
        """
        if self._draining:
            raise _draining()
        if self._line or self._num_in_flight >= self._limit:
            await self._wait(_Waiter(num_choices, standing, num_bytes), limits())
        else:
            self._take(num_choices, standing)

    def body(self) -> BodyBytes:
        """Count the bytes of one body until it is released, at the latest at the end."""
        return BodyBytes(self)

    def _take(self, num_choices: int, standing: Standing) -> None:
        self._num_in_flight += num_choices
        self._in_flight[standing.tier] += num_choices

    def release(self, num_choices: int, standing: Standing) -> None:
        """A ``Place`` of a request of ``standing`` was given back."""
        self._num_in_flight -= num_choices
        self._in_flight[standing.tier] -= num_choices
        self._pace.note(num_choices, asyncio.get_running_loop().time())
        if self._line:
            self._let_in()

    def count_body(self, num_bytes: int) -> None:
        """``num_bytes`` more (or fewer) are held."""
        self._bodies.num_bytes += num_bytes

    def check_body_bytes(self, num_leaving: int = 0) -> None:
        """Raise TooManyRequestsError where bodies take more than they may.

        ``num_leaving`` are bytes of requests that were told to go, and have not gone.
        """
        if self.body_bytes - num_leaving > self._bodies.max_bytes:
            raise TooManyRequestsError(
                f"bodies of {self.body_bytes} bytes are read or wait for a place, and "
                f"router.max_queue_bytes is {self._bodies.max_bytes}. Fix: retry in a moment",
                retry_after_s=self._retry_after_s(self._last_order),
            )

    def _retry_after_s(self, order: int) -> float:
        """When a request of this tier that comes now would be let in, as far as is known."""
        num_ahead = self._line.num_ahead_of(order) + 1
        wait_s = self._pace.wait_s(num_ahead, asyncio.get_running_loop().time())
        return min(wait_s or 1.0, MAX_RETRY_AFTER_S)

    def _shed_for(self, waiter: _Waiter) -> None:
        """Make room for the body of ``waiter``, at the cost of tiers behind its own.

        Raises:
            TooManyRequestsError: there is nobody of them, or it would not do.
        """
        num_leaving = 0
        while self.body_bytes - num_leaving > self._bodies.max_bytes:
            victim = self._line.last_behind(waiter.standing.order)
            if victim is None:
                break
            self._line.remove(victim)
            if not victim.turn.done():
                num_leaving += victim.num_bytes
                victim.turn.set_exception(self._shed(victim.standing))
        self.check_body_bytes(num_leaving)

    def _shed(self, standing: Standing) -> TooManyRequestsError:
        return TooManyRequestsError(
            f"service_tier = {standing.tier!r}: requests of other tiers go first, and there is no "
            "more room to wait (router.max_queue_bytes). Fix: retry later, or send another tier",
            retry_after_s=self._retry_after_s(standing.order),
        )

    async def _wait(self, waiter: _Waiter, limits: Collection[Budget]) -> None:
        try:
            await self._wait_in_line(waiter, limits)
        except TooManyRequestsError:
            self._on_refused(waiter.standing)
            raise

    async def _wait_in_line(self, waiter: _Waiter, limits: Collection[Budget]) -> None:
        self._shed_for(waiter)
        loop = asyncio.get_running_loop()
        now = loop.time()
        queue = Budget.start(BudgetKind.QUEUE, self._queue_timeout_s, now, "router.queue_timeout_s")
        budget = earliest((queue, *limits))
        self._line.add(waiter)
        self._let_in()
        urgent = loop.call_at(now + WAIT_SHARE * waiter.standing.ttft_s, self._let_in)
        try:
            async with asyncio.timeout_at(budget.until):
                await waiter.turn
        except BaseException as error:
            if waiter.has_place:  # given in the same turn of the loop in which the wait ended
                self.release(waiter.num_choices, waiter.standing)
            if isinstance(error, TimeoutError):
                failure = budget.error(
                    f"{self._num_in_flight} choices were in flight, of {self._limit} that may be"
                )
                if budget is not queue:
                    raise failure from error
                raise TooManyRequestsError(
                    f"{failure.message}. Fix: retry later",
                    retry_after_s=self._retry_after_s(waiter.standing.order),
                ) from error
            raise
        finally:
            urgent.cancel()
            self._line.remove(waiter)

    def _let_in(self) -> None:
        while (waiter := self._next()) is not None:
            if not waiter.turn.done():
                self._take(waiter.num_choices, waiter.standing)
                waiter.turn.set_result(None)

    def _next(self) -> _Waiter | None:
        """Take out who may come in now; None: nobody."""
        if self._num_in_flight < self._limit:
            return self._line.pop()
        if self._num_in_flight >= self._urgent_limit:
            return None
        first = self._line.first_in_order()
        if first is None or not self._is_urgent(first):
            return None
        self._line.remove(first)
        return first

    def _is_urgent(self, waiter: _Waiter) -> bool:
        """Whether it would miss its target if it waited for the next place that comes free."""
        standing = waiter.standing
        if standing.order >= self._last_order or not standing.ttft_s:
            return False
        now = asyncio.get_running_loop().time()
        wait_s = now - waiter.since + (self._pace.wait_s(1, now) or 0.0)
        return wait_s >= WAIT_SHARE * standing.ttft_s


def _draining() -> DrainingError:
    return DrainingError("the router is shutting down. Fix: retry in a moment")
