"""The limits of one choice's time: in all, to its first token, between two tokens.

One timer watches them. A token only leaves its moment behind; the timer looks at it when it rings,
and is set anew for what is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from router.requests.generation import Generation
from runtime.budget import Budget, BudgetKind, earliest
from runtime.config import RouterSection


def limits_from_arrival(section: RouterSection, received: float) -> tuple[Budget, Budget]:
    """(in all, to the first token): both begin when the request arrives, and run in the queue."""
    return (
        Budget.start(
            BudgetKind.REQUEST, section.request_timeout_s, received, "router.request_timeout_s"
        ),
        Budget.start(
            BudgetKind.FIRST_TOKEN,
            section.first_token_timeout_s,
            received,
            "router.first_token_timeout_s",
        ),
    )


class TimeLimits:
    """Runs one choice and ends it when one of its limits is over."""

    def __init__(self, generation: Generation, section: RouterSection) -> None:
        """All limits count from the request's arrival."""
        received = generation.timings.received
        self._generation = generation
        self._section = section
        self.request = Budget.start(
            BudgetKind.REQUEST, section.request_timeout_s, received, "router.request_timeout_s"
        )
        self._loop = generation.loop
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._over: Budget | None = None

    async def run(self, work: Awaitable[None]) -> None:
        """Await ``work``; to be called once.

        Raises:
            DeadlineExceededError: a limit is over, and ``work`` was cancelled.
        """
        generation = self._generation
        self._task = task = asyncio.current_task()
        assert task is not None
        num_others = task.cancelling()
        self._set_timer()
        try:
            await work
        except asyncio.CancelledError:
            if self._over is None or task.uncancel() > num_others:
                raise  # by somebody else
            raise self._over.error(generation.phase, generation.request_id) from None
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _current(self) -> Budget:
        """The limit that ends first, as things are now."""
        timings = self._generation.timings
        if not self._generation.num_tokens:
            return earliest(limits_from_arrival(self._section, timings.received))
        token_s, since = self._section.token_timeout_s, timings.last_token
        following = Budget.start(BudgetKind.NEXT_TOKEN, token_s, since, "router.token_timeout_s")
        return earliest((self.request, following))

    def _set_timer(self) -> None:
        # A first token may come meanwhile, and with it a limit that ends earlier, but not before.
        latest = self._loop.time() + self._section.token_timeout_s
        self._timer = self._loop.call_at(min(self._until(), latest), self._ring)

    def _until(self) -> float:
        """When ``_current`` is over."""
        section, timings = self._section, self._generation.timings
        if self._generation.num_tokens:
            until = timings.last_token + section.token_timeout_s
        else:
            until = timings.received + section.first_token_timeout_s
        return min(self.request.until, until)

    def _ring(self) -> None:
        current, now = self._current(), self._loop.time()
        if current.is_over(now):
            self._over = current
            assert self._task is not None
            self._task.cancel()
        else:
            self._set_timer()
