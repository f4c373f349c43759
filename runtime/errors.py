"""The one exception tree of Tandem.

Foreign errors (gRPC, Ray, transfer libraries) are mapped to these where they appear.
A message says what is wrong, the value, and the fix; the request id travels beside it.
``runtime.rpc.wire`` carries them between processes.
"""

from __future__ import annotations

import enum


class ErrorCode(enum.IntEnum):
    """Why a request failed; the numbers are those of ``ErrorCode`` in ``proto/common.proto``."""

    INVALID_REQUEST = 1
    OVERLOADED = 2
    DEADLINE_EXCEEDED = 3
    CANCELLED = 4
    TRANSFER_FAILED = 5
    PEER_LOST = 6
    STALE_TICKET = 7
    LAYOUT_MISMATCH = 8
    OUT_OF_BLOCKS = 9
    DRAINING = 10
    INTERNAL = 11


class TandemError(Exception):
    """Any failure that a request can be answered with."""

    code = ErrorCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        suspect: bool = False,
        relayed_from: str = "",
    ) -> None:
        """Say why.

        Args:
            message: what, the value, and the fix.
            request_id: of the request, where it is known.
            suspect: a step or a rank failed, and the request is one of those that may be why.
            relayed_from: "instance/rank" that said it, where another passes it on.
        """
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.suspect = suspect
        self.relayed_from = relayed_from

    def of(self, request_id: str) -> TandemError:
        """The same, said of one request."""
        return type(self)(
            self.message,
            request_id=request_id,
            suspect=self.suspect,
            relayed_from=self.relayed_from,
        )


class InvalidRequestError(TandemError):
    """The caller asked for something that can never be served; retrying does not help."""

    code = ErrorCode.INVALID_REQUEST


class OverloadedError(TandemError):
    """No room now; the same request may succeed later or elsewhere."""

    code = ErrorCode.OVERLOADED


class DeadlineExceededError(TandemError):
    """The request's time is over; the message names which wait used it up."""

    code = ErrorCode.DEADLINE_EXCEEDED


class RequestCancelledError(TandemError):
    """The client went away or a peer aborted the request."""

    code = ErrorCode.CANCELLED


class TransferFailedError(TandemError):
    """The KV did not arrive; another pair may still serve the request."""

    code = ErrorCode.TRANSFER_FAILED


class PeerLostError(TandemError):
    """The other process died or cannot be reached."""

    code = ErrorCode.PEER_LOST


class StaleTicketError(TandemError):
    """A ticket or an address of an earlier life: wrong epoch, wrong nonce, replayed or revoked."""

    code = ErrorCode.STALE_TICKET


class LayoutMismatchError(TandemError):
    """Two workers store KV differently and must never be paired."""

    code = ErrorCode.LAYOUT_MISMATCH


class OutOfBlocksError(TandemError):
    """The KV pool cannot hold this one request, now or (if it says so) ever."""

    code = ErrorCode.OUT_OF_BLOCKS


class DrainingError(TandemError):
    """The worker finishes what it has and takes nothing new."""

    code = ErrorCode.DRAINING


class InternalError(TandemError):
    """A broken invariant of ours."""

    code = ErrorCode.INTERNAL


class DeviceError(InternalError):
    """A device hangs or is lost under a step: of a rank's requests only those of the step may be
    why.
    """


class ConfigError(ValueError):
    """A setting that cannot work, found before anything starts.

    ``path`` is the field (``"prefill.tp"``), ``value`` what stands there, ``fix`` what to write.
    """

    def __init__(self, path: str, value: object, problem: str, fix: str) -> None:
        super().__init__(f"{path} = {value!r}: {problem}. Fix: {fix}")
        self.path = path
        self.value = value
        self.problem = problem
        self.fix = fix


ERRORS_BY_CODE: dict[ErrorCode, type[TandemError]] = {
    error.code: error
    for error in (
        InvalidRequestError,
        OverloadedError,
        DeadlineExceededError,
        RequestCancelledError,
        TransferFailedError,
        PeerLostError,
        StaleTicketError,
        LayoutMismatchError,
        OutOfBlocksError,
        DrainingError,
        InternalError,
    )
}
