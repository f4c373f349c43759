"""Failures as OpenAI clients know them: status, ``{"error": {...}}``, headers that steer retries.

SDKs retry 408, 409, 429 and 5xx by themselves, so a client's own mistake is never answered with
those, and an answer that another attempt cannot better carries ``x-should-retry: false``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.errors import NotReadyError, RateLimitError, RequestError, TooManyRequestsError
from runtime.errors import ErrorCode, TandemError

CLIENT_CLOSED = 499


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    type: str
    code: str
    retry_after_s: int = 0
    """0: no Retry-After."""
    should_retry: bool = True


_ANSWERS: dict[ErrorCode, _Answer] = {
    ErrorCode.INVALID_REQUEST: _Answer(400, "invalid_request_error", "invalid_request"),
    ErrorCode.OVERLOADED: _Answer(503, "server_error", "server_is_overloaded", 1),
    ErrorCode.DEADLINE_EXCEEDED: _Answer(504, "server_error", "timeout", 0, False),
    ErrorCode.CANCELLED: _Answer(503, "server_error", "request_cancelled", 1),
    ErrorCode.TRANSFER_FAILED: _Answer(502, "server_error", "kv_transfer_failed"),
    ErrorCode.PEER_LOST: _Answer(502, "server_error", "worker_lost", 1),
    ErrorCode.STALE_TICKET: _Answer(502, "server_error", "worker_restarted", 1),
    ErrorCode.LAYOUT_MISMATCH: _Answer(502, "server_error", "layout_mismatch", 0, False),
    ErrorCode.OUT_OF_BLOCKS: _Answer(503, "server_error", "out_of_kv_blocks", 1),
    ErrorCode.DRAINING: _Answer(503, "server_error", "server_is_draining", 1),
    ErrorCode.INTERNAL: _Answer(500, "server_error", "internal_error", 0, False),
}
_SPECIAL: dict[type[TandemError], _Answer] = {
    TooManyRequestsError: _Answer(429, "rate_limit_error", "rate_limit_exceeded", 1),
    RateLimitError: _Answer(429, "rate_limit_error", "rate_limit_exceeded"),
    NotReadyError: _Answer(503, "server_error", "server_not_ready", 1),
}


STATUSES = (
    *sorted({answer.status for answer in (*_ANSWERS.values(), *_SPECIAL.values())}),
    CLIENT_CLOSED,
)
LABELS = tuple(sorted({answer.code for answer in (*_ANSWERS.values(), *_SPECIAL.values())}))
"""Those of failures that any request may meet, for metrics that begin before the first of them."""
OURS = frozenset(
    answer.code for answer in (*_ANSWERS.values(), *_SPECIAL.values()) if answer.status >= 500
)
"""Codes of failures that no caller can mend; every other code is of a caller's own mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure, ready to be sent as an HTTP answer or as an event in a stream."""

    status: int
    message: str
    type: str
    code: str | None
    param: str | None
    headers: dict[str, str]

    @property
    def label(self) -> str:
        """The code as metrics have it, where every failure has one."""
        return self.code or "invalid_request"

    def body(self, request_id: str) -> dict[str, object]:
        """The JSON object; the request id stands in it because a stream's headers are long gone."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
                "request_id": request_id,
            }
        }


def failure_from(error: TandemError) -> Failure:
    """How ``error`` is told to a client."""
    if isinstance(error, RequestError):
        return Failure(
            status=error.status,
            message=error.message,
            type=error.type,
            code=error.error_code,
            param=error.param,
            headers=error.headers,
        )
    answer = _SPECIAL.get(type(error)) or _ANSWERS[error.code]
    headers = dict(error.headers) if isinstance(error, RateLimitError) else {}
    if answer.retry_after_s:
        seconds: float = answer.retry_after_s
        if isinstance(error, TooManyRequestsError):
            seconds = max(seconds, error.retry_after_s)
        headers["Retry-After"] = str(math.ceil(seconds))
    if not answer.should_retry:
        headers["x-should-retry"] = "false"
    return Failure(
        status=answer.status,
        message=error.message,
        type=answer.type,
        code=answer.code,
        param=None,
        headers=headers,
    )
