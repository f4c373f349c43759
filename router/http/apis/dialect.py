"""How an API writes what is no content: failures, and the end of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.http.errors import Failure
from router.http.wire import sse

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Of one API."""

    failure: Callable[[Failure, str], Json]
    """The JSON of a failure; the string is the request's id."""
    event_of: Callable[[Failure, str], bytes]
    """A failure in a stream."""
    done: bytes = sse.DONE
    """What ends a stream, failed or not."""


OPENAI = Dialect(
    failure=Failure.body,
    event_of=lambda failure, request_id: sse.event(failure.body(request_id)),
)
