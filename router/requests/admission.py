"""How many choices may be in flight at once, and the queue of requests that wait for their turn.

Requests wait here first in, first out, for as long as ``router.queue_timeout_s`` and with bodies of
at most ``router.max_queue_bytes`` together; beyond either, one is answered 429. The limit follows
what decode can hold, so that workers are never asked for more than they have; tokens are made only
for a request that has a place. Some of it is held back: a request that was aborted leaves its place
here before its place in decode. An HTTP request is admitted whole: one with many choices may pass
the limit by those that it runs at once, but is never refused halfway.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Collection, Iterable, Iterator

from router.errors import TooManyRequestsError
from router.pool.members import Member
from runtime.budget import Budget, BudgetKind, earliest
from runtime.errors import DrainingError

QUEUE_TIMEOUT_S = 900.0
MAX_QUEUE_BYTES = 256 * 2**20
SMALL_BODY_BYTES = 64 * 2**10
"""A body of up to this size is read however many bytes of others are: connections bound those."""

LET_IN_SHARE = 0.75
"""Of what decode takes on. The rest is for requests that end in decode a moment later than here,
and for one with many choices that passes the limit."""
REQUESTS_OF_SILENT_RANK = 128
"""Of a decode rank that does not say how many it takes on."""


def limit_of(decodes: Iterable[Member], num_processes: int) -> int:
    """Choices that one of ``num_processes`` lets in, for these decode ranks; 0 without any.

    Where a rank is in the pools of several routers, each lets in its share.
    """
    shares = [
        (rank.max_num_requests or REQUESTS_OF_SILENT_RANK) / rank.num_routers for rank in decodes
    ]
    return math.ceil(LET_IN_SHARE * sum(shares) / num_processes)


class Place:
    """A request's place in flight; may be given back before its answer is out."""

    def __init__(self, admission: Admission, num_choices: int) -> None:
        self._admission = admission
        self._num_choices = num_choices

    def give_back(self) -> None:
        """Let the next request in; idempotent."""
        num_choices, self._num_choices = self._num_choices, 0
        if num_choices:
            self._admission.release(num_choices)


class BodyBytes:
    """What one body takes of the memory for bodies that are read or wait."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """More of it was read.

        Raises:
            TooManyRequestsError: all bodies together are too large, and this one is not small.
        """
        self._budget.count(num_bytes)
        self.num_bytes += num_bytes
        if self.num_bytes > SMALL_BODY_BYTES:
            self._budget.check()

    def release(self) -> None:
        """It waits no more; idempotent."""
        self._budget.count(-self.num_bytes)
        self.num_bytes = 0


class BodyBudget:
    """Bytes of bodies that are read or wait, whichever model they are for."""

    def __init__(self, max_bytes: int = MAX_QUEUE_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    @contextlib.contextmanager
    def body(self) -> Iterator[BodyBytes]:
        """Count the bytes of one body until it is released, at the latest at the end."""
        held = BodyBytes(self)
        try:
            yield held
        finally:
            held.release()

    def count(self, num_bytes: int) -> None:
        """``num_bytes`` more (or fewer) are held."""
        self.num_bytes += num_bytes

    def check(self) -> None:
        """Raise TooManyRequestsError where bodies take more than they may."""
        if self.num_bytes > self._max_bytes:
            raise TooManyRequestsError(
                f"bodies of {self.num_bytes} bytes are read or wait for a place, and "
                f"router.max_queue_bytes is {self._max_bytes}. Fix: retry in a moment"
            )


class _Waiter:
    """One request in the queue."""

    def __init__(self, num_choices: int) -> None:
        self.num_choices = num_choices
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
        bodies: BodyBudget | None = None,
    ) -> None:
        """``limit``: choices in flight, until ``set_limit`` says otherwise.

        ``bodies``: what all that wait here or elsewhere may take; None: a budget of its own.
        """
        self._limit = limit
        self._queue_timeout_s = queue_timeout_s
        self._bodies = bodies or BodyBudget()
        self._num_in_flight = 0
        self._draining = False
        self._waiters: dict[_Waiter, None] = {}  # in the order of arrival

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
        return len(self._waiters)

    @property
    def oldest_wait_s(self) -> float:
        """How long the first of them has waited; 0 where nobody does."""
        first = next(iter(self._waiters), None)
        return asyncio.get_running_loop().time() - first.since if first is not None else 0.0

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the process is about to end."""
        return self._draining

    def set_limit(self, limit: int) -> None:
        """What the workers can hold has changed."""
        self._limit = limit
        self._let_in()

    def drain(self) -> None:
        """Admit nothing from now on; who waits is told so."""
        self._draining = True
        for waiter in self._waiters:
            if not waiter.turn.done():
                waiter.turn.set_exception(_draining())

    @contextlib.asynccontextmanager
    async def admit(
        self, num_choices: int, limits: Collection[Budget] = ()
    ) -> AsyncIterator[Place]:
        """Wait for a place for one HTTP request that runs ``num_choices`` at once, and hold it.

        ``limits`` are the request's own.

        Raises:
            TooManyRequestsError: none was free in time, or too much waits already.
            DeadlineExceededError: a limit of the request's own was over before.
            DrainingError: the process is about to end.
        """
        if self._draining:
            raise _draining()
        if self._waiters or self._num_in_flight >= self._limit:
            await self._wait(num_choices, limits)
        else:
            self._num_in_flight += num_choices
        place = Place(self, num_choices)
        try:
            yield place
        finally:
            place.give_back()

    def release(self, num_choices: int) -> None:
        """A ``Place`` was given back."""
        self._num_in_flight -= num_choices
        self._let_in()

    async def _wait(self, num_choices: int, limits: Collection[Budget]) -> None:
        self._bodies.check()
        now = asyncio.get_running_loop().time()
        queue = Budget.start(BudgetKind.QUEUE, self._queue_timeout_s, now, "router.queue_timeout_s")
        budget = earliest((queue, *limits))
        waiter = _Waiter(num_choices)
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout_at(budget.until):
                await waiter.turn
        except BaseException as error:
            if waiter.has_place:  # given in the same turn of the loop in which the wait ended
                self.release(num_choices)
            if isinstance(error, TimeoutError):
                failure = budget.error(
                    f"{self._num_in_flight} choices were in flight, of {self._limit} that may be"
                )
                if budget is not queue:
                    raise failure from error
                raise TooManyRequestsError(f"{failure.message}. Fix: retry later") from error
            raise
        finally:
            self._waiters.pop(waiter, None)

    def _let_in(self) -> None:
        while self._num_in_flight < self._limit:
            waiter = next(iter(self._waiters), None)
            if waiter is None:
                return
            del self._waiters[waiter]
            if not waiter.turn.done():
                self._num_in_flight += waiter.num_choices
                waiter.turn.set_result(None)


def _draining() -> DrainingError:
    return DrainingError("the router is shutting down. Fix: retry in a moment")
