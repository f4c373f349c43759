"""How many requests may be in the workers' hands at once; the next one is answered 429 at once.

Queueing belongs to the workers, who know their memory; a second queue here would only hide load
from the client. One HTTP request with many choices counts each choice that is running.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from router.openai_errors import TooManyRequestsError
from runtime.errors import DrainingError


class Admission:
    """Counts requests in flight. One event loop owns it."""

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        self._num_in_flight = 0
        self._draining = False

    @property
    def num_in_flight(self) -> int:
        """Choices that are running."""
        return self._num_in_flight

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the process is about to end."""
        return self._draining

    def drain(self) -> None:
        """Admit nothing from now on."""
        self._draining = True

    def check(self) -> None:
        """Raise what ``slot`` would raise now."""
        if self._draining:
            raise DrainingError("the router is shutting down. Fix: retry in a moment")
        if self._num_in_flight >= self._max_concurrent:
            raise TooManyRequestsError(
                f"{self._num_in_flight} requests are in flight, which is "
                "router.max_concurrent_requests. Fix: retry in a moment, or raise the limit"
            )

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one place.

        Raises:
            TooManyRequestsError: all are taken.
            DrainingError: the process is about to end.
        """
        self.check()
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1
