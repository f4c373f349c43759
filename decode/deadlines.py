"""Whether a request is late, and which wait made it so. Pure.

Decode owns the deadlines of a request from Reserve on: the request's own, and while its KV is on
the way that of the transfer, which begins anew with every sign that prefill still computes. The
error names the wait, because that is what has to be cured.
"""

from __future__ import annotations

from decode.requests import DecodeRequest
from decode.tickets import Ticket
from runtime.errors import TandemError, TransferFailedError
from worker.lifecycle import DecodeStatus

SENT_GRACE_S = 2.0
"""Flags are written before a part closes as sent: later than this after the last, they are lost."""


def overdue(request: DecodeRequest, ticket: Ticket | None, now: float) -> TandemError | None:
    """Why the request must end now, or None.

    Args:
        request: live.
        ticket: its open ticket, in WAITING_FOR_KV.
        now: monotonic seconds.
    """
    if request.budget.is_over(now):
        return request.budget.error(_wait(request, now), request.request_id)
    return None if ticket is None else _transfer_overdue(request, ticket, now)


def _transfer_overdue(request: DecodeRequest, ticket: Ticket, now: float) -> TandemError | None:
    if ticket.all_sent_at and now >= ticket.all_sent_at + SENT_GRACE_S:
        return TransferFailedError(
            f"all parts of {request.writer.instance} say that the KV is sent, "
            "but its metadata never arrived",
            request_id=request.request_id,
        )
    if request.transfer is not None and request.transfer.is_over(now):
        # Not the request's time but the transfer's: another pair may do better.
        return request.transfer.error(_wait(request, now), request.request_id)
    return None


def _wait(request: DecodeRequest, now: float) -> str:
    num_tokens = request.request.num_output_tokens
    writer = request.writer.instance
    match request.status:
        case DecodeStatus.RESERVED:
            return f"waiting for {writer} to claim KV blocks"
        case DecodeStatus.CLAIMED:
            return f"queued for KV blocks ({now - request.claimed_at:.1f} s)"
        case DecodeStatus.WAITING_FOR_KV:
            return f"waiting for {writer} to send the KV ({now - request.allocated_at:.1f} s)"
        case DecodeStatus.WAITING:
            return f"waiting for a place in the batch ({now - request.arrived_at:.1f} s)"
        case DecodeStatus.OFFLOADING | DecodeStatus.PREEMPTED:
            return f"preempted and waiting for KV blocks, after {num_tokens} tokens"
        case _:
            return f"decoding, after {num_tokens} tokens"
