"""How an API writes what is no content: failures, and the end of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.http import sse
from router.http.errors import Failure

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Of one API."""

    failure: Callable[[Failure, str], Json]
    """The JSON of a failure; the string is the request's id."""
    failure_event: str = ""
    """The name of the event that carries it in a stream; empty: none has names."""
    done: bytes = sse.DONE
    """What ends a stream, failed or not."""

    def event_of(self, failure: Failure, request_id: str) -> bytes:
        """``failure`` in a stream."""
        name = f"event: {self.failure_event}\n" if self.failure_event else ""
        return name.encode() + sse.event(self.failure(failure, request_id))


OPENAI = Dialect(failure=Failure.body)
