"""A rank's `KVSender` in the prefill worker's terms: tickets by nonce, reports as closures.

The sender knows tickets by a request id that must be unique among the open ones. A router may try
a request again while its first try is still draining, so the sender is given the nonce as the id.
"""

from __future__ import annotations

from dataclasses import replace

from kv_transfer.metadata import MetadataRecord
from kv_transfer.sender import KVSender
from kv_transfer.ticket import SendOutcome, SendReport
from prefill.commands import AbandonTicket, FinishTicket, OpenTicket, PushBlocks, SenderCommand
from prefill.kv_push import ReadyCheck
from prefill.rank_plan import Closure, ClosureOutcome
from prefill.sender_group import TicketSender

_OUTCOMES = {
    SendOutcome.SENT: ClosureOutcome.SENT,
    SendOutcome.ABANDONED: ClosureOutcome.ABANDONED,
    SendOutcome.FAILED: ClosureOutcome.FAILED,
}


def sender_id(nonce: int) -> str:
    """What the sender calls the ticket."""
    return f"ticket-{nonce:016x}"


class RankSender:
    """Implements `sender_group.TicketSender` on a `KVSender`."""

    def __init__(self, sender: KVSender) -> None:
        self._sender = sender

    @property
    def is_alive(self) -> bool:
        """Whether every lane's thread runs."""
        return self._sender.is_alive

    def open(self, command: OpenTicket) -> None:
        """Prepare to send under a ticket."""
        ticket = replace(command.ticket, request_id=sender_id(command.ticket.nonce))
        self._sender.open(ticket, command.peer)

    def push(self, push: PushBlocks, layers: tuple[int, int], ready: ReadyCheck | None) -> None:
        """Send our part of the blocks, layers [a, b), once `ready` says True."""
        self._sender.push(
            sender_id(push.nonce),
            push.src_block_ids,
            push.first_block_index,
            layers=layers,
            ready=ready,
        )

    def finish(self, nonce: int, record: MetadataRecord | None) -> None:
        """Close once all pushes have landed; rank 0 also sends the record."""
        self._sender.finish(sender_id(nonce), record)

    def abandon(self, nonce: int) -> None:
        """Drop what is not posted yet and close once the rest has landed."""
        self._sender.abandon(sender_id(nonce))

    def close(self) -> None:
        """Abandon what is open, wait until it is drained, and end the sender's threads."""
        self._sender.close()


def closure_of(report: SendReport) -> Closure:
    """What the report means for rank 0 and for decode."""
    first, last = report.first_post_at, report.last_done_at
    return Closure(
        nonce=report.nonce,
        outcome=_OUTCOMES[report.outcome],
        drained=report.drained,
        num_bytes=report.num_bytes,
        num_descriptors=report.num_descriptors,
        post_s=report.post_s,
        wire_s=report.wire_s,
        transfer_s=last - first if first is not None and last is not None else 0.0,
        finished_at=last or 0.0,
        error_code=report.error.code if report.error else None,
        error=report.error.message if report.error else "",
    )


def apply_command(sender: TicketSender, command: SenderCommand) -> None:
    """Carry out a follower's command other than a push, which needs the step that it belongs to."""
    match command:
        case OpenTicket():
            sender.open(command)
        case FinishTicket(nonce):
            sender.finish(nonce, None)
        case AbandonTicket(nonce):
            sender.abandon(nonce)
