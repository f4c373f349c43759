"""What the router refuses for reasons of its own, beside `runtime.errors`.

Raised in any room of the router; `http.errors` knows how each is told to a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from runtime.errors import InternalError, InvalidRequestError, OverloadedError, TandemError


class RequestError(InvalidRequestError):
    """A request that can never be served: what field, what value, what to send instead."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = HTTPStatus.BAD_REQUEST,
        headers: Mapping[str, str] | None = None,
        type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.type = type
        self.headers = dict(headers or {})
        self.param = param
        self.error_code = code
        self.status = int(status)


class RecordingError(RequestError):
    """What experts get cannot be recorded now (409)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="cannot_record", status=HTTPStatus.CONFLICT)


class AuthenticationError(RequestError):
    """The request has no API key, or one that is nobody's (401)."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            code="invalid_api_key",
            status=HTTPStatus.UNAUTHORIZED,
            headers={"WWW-Authenticate": "Bearer"},
            type="authentication_error",
        )


class ForbiddenError(RequestError):
    """The request's API key is known, and may not do this (403)."""

    def __init__(self, message: str, *, param: str | None, code: str) -> None:
        super().__init__(
            message,
            param=param,
            code=code,
            status=HTTPStatus.FORBIDDEN,
            type="permission_error",
        )


class TooManyRequestsError(OverloadedError):
    """The router itself is full (429); a worker that is full is another matter (503)."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        """``retry_after_s``: when there may be room again, as far as is known."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimitError(TooManyRequestsError):
    """The request's API key has used up one of its limits (429)."""

    def __init__(self, message: str, *, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.headers = dict(headers)


class NotReadyError(OverloadedError):
    """No pair of workers has been there yet (503): the cluster is starting."""


def as_tandem_error(error: BaseException) -> TandemError:
    """``error`` in our tree; a foreign one is our fault and shows its type, not its insides."""
    if isinstance(error, TandemError):
        return error
    return InternalError(f"internal error of the router ({type(error).__name__})")
