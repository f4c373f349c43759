"""What a CloseTickets message says, in the terms of our books. Pure.

Whatever is not one of the outcomes that we know, from a newer prefill worker for example, is a
failure: nothing more comes, and only the sender's own word says whether its writes are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decode.requests import Writer, writer_key
from runtime.errors import RequestCancelledError, TandemError, TransferFailedError
from runtime.pb import common_pb2, decode_pb2
from runtime.rpc.wire import error_from_proto

_GOOD_OUTCOMES = (
    decode_pb2.TICKET_OUTCOME_SENT,
    decode_pb2.TICKET_OUTCOME_NOT_NEEDED,
    decode_pb2.TICKET_OUTCOME_ABANDONED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEnd:
    """How one rank of a writer ended its part.

    Attributes:
        rank: of the prefill instance.
        peer: "instance/rank", for metrics.
        outcome: one that we know.
        is_drained: its writes are known to be complete.
        failure: what the request ends with, should this end it.
        timings: of this part.
        num_bytes: that it sent.
    """

    rank: int
    peer: str
    outcome: decode_pb2.TicketOutcome
    is_drained: bool
    failure: TandemError
    timings: common_pb2.Timings
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """What ranks of a writer, by its `Writer.key`, say of one ticket."""

    request_id: str
    nonce: int
    key: str
    parts: tuple[PartEnd, ...]

    def is_known(self, writer_of: Callable[[int], Writer | None]) -> bool:
        """Whether the ticket is this writer's, and every part one of its ranks."""
        writer = writer_of(self.nonce)
        if writer is None or writer.key != self.key:
            return False
        return all(writer.has_rank(part.rank) for part in self.parts)


def read_closings(message: decode_pb2.CloseTicketsRequest) -> list[Closing]:
    """All tickets of a message."""
    writer, key = message.prefill, writer_key(message.prefill)
    return [
        Closing(
            request_id=closure.request_id,
            nonce=closure.nonce,
            key=key,
            parts=tuple(_part_end(writer, part) for part in closure.parts),
        )
        for closure in message.closures
    ]


def _part_end(writer: common_pb2.WorkerIdentity, part: decode_pb2.PartClosure) -> PartEnd:
    outcome = part.outcome
    if outcome not in _GOOD_OUTCOMES:
        outcome = decode_pb2.TICKET_OUTCOME_FAILED
    return PartEnd(
        rank=part.rank,
        peer=f"{writer.instance}/{part.rank}",
        outcome=outcome,
        is_drained=part.drained or outcome != decode_pb2.TICKET_OUTCOME_FAILED,
        failure=_failure_of(writer, part),
        timings=part.timings,
        num_bytes=part.num_bytes,
    )


def _failure_of(writer: common_pb2.WorkerIdentity, part: decode_pb2.PartClosure) -> TandemError:
    if part.HasField("error"):
        # By the name that routers know: that of its first rank, which speaks for all.
        name = f"{writer.instance}/{writer.rank}"
        return error_from_proto(part.error, relayed_from=name)
    who = f"{writer.instance} rank {part.rank}"
    if part.outcome == decode_pb2.TICKET_OUTCOME_ABANDONED:
        return RequestCancelledError(f"{who} abandoned the transfer")
    return TransferFailedError(f"{who} could not send the KV")
