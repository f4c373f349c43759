"""How many choices may be in flight at once; the next request is answered 429 at once.

Queueing belongs to the workers, who know their memory; a second queue here would only hide load
from the client. An HTTP request is admitted whole: one with many choices may pass the limit by
those that it runs at once, but is never refused halfway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from router.http.errors import TooManyRequestsError
from runtime.errors import DrainingError


class Admission:
    """Counts what is in flight. One event loop owns it."""

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        self._num_in_flight = 0
        self._draining = False

    @property
    def num_in_flight(self) -> int:
        """Choices of the requests that are not answered yet."""
        return self._num_in_flight

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the process is about to end."""
        return self._draining

    def drain(self) -> None:
        """Admit nothing from now on."""
        self._draining = True

    @contextlib.contextmanager
    def admit(self, num_choices: int) -> Iterator[None]:
        """Hold places for one HTTP request that runs ``num_choices`` at once.

        Raises:
            TooManyRequestsError: all places are taken.
            DrainingError: the process is about to end.
        """
        if self._draining:
            raise DrainingError("the router is shutting down. Fix: retry in a moment")
        if self._num_in_flight >= self._max_concurrent:
            raise TooManyRequestsError(
                f"{self._num_in_flight} requests are in flight, and "
                f"router.max_concurrent_requests is {self._max_concurrent}. "
                "Fix: retry in a moment, or raise the limit"
            )
        self._num_in_flight += num_choices
        try:
            yield
        finally:
            self._num_in_flight -= num_choices
