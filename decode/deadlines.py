"""Whether a request is late, and which wait made it so. Pure.

Decode owns the deadlines of a request from Reserve on: the request's own, and while its KV is on
the way that of the transfer. The error names the wait, because that is what has to be cured.
"""

from __future__ import annotations

from decode.requests import DecodeRequest
from decode.tickets import Ticket
from runtime.errors import DeadlineExceededError, TandemError, TransferFailedError
from runtime.lifecycle import DecodeStatus

SENT_GRACE_S = 2.0
"""Flags are written before a part closes as sent: later than this after the last, they are lost."""


def overdue(request: DecodeRequest, ticket: Ticket | None, now: float) -> TandemError | None:
    """Why the request must end now, or None.

    Args:
        request: live.
        ticket: its open ticket, in WAITING_FOR_KV.
        now: monotonic seconds.
    """
    if now < request.deadline:
        return None if ticket is None else _transfer_overdue(request, ticket, now)
    total = request.deadline - request.received_at
    return DeadlineExceededError(
        f"the request's {total:g} s are over {_wait(request, now)}", request_id=request.request_id
    )


def _transfer_overdue(request: DecodeRequest, ticket: Ticket, now: float) -> TandemError | None:
    if ticket.all_sent_at and now >= ticket.all_sent_at + SENT_GRACE_S:
        return TransferFailedError(
            f"all parts of {request.writer.instance} say that the KV is sent, "
            "but its metadata never arrived",
            request_id=request.request_id,
        )
    if now >= request.transfer_deadline:
        # Not the request's time but the transfer's: another pair may do better.
        return TransferFailedError(
            f"no complete KV {_wait(request, now)} (kv_transfer.transfer_timeout_s)",
            request_id=request.request_id,
        )
    return None


def _wait(request: DecodeRequest, now: float) -> str:
    match request.status:
        case DecodeStatus.RESERVED:
            return f"while it was queued for KV blocks ({now - request.received_at:.1f} s)"
        case DecodeStatus.WAITING_FOR_KV:
            waited = now - request.allocated_at
            return f"after {waited:.1f} s of waiting for {request.writer.instance} to send it"
        case DecodeStatus.WAITING:
            waited = now - request.arrived_at
            return f"while it waited for a place in the batch ({waited:.1f} s)"
        case DecodeStatus.OFFLOADING | DecodeStatus.PREEMPTED:
            return (
                "while it was preempted and waited for KV blocks "
                f"(after {request.request.num_output_tokens} tokens)"
            )
        case _:
            return f"after {request.request.num_output_tokens} tokens"
