"""The KV of requests on its way here: what arrives, and what its writers say of their parts.

Every method is called on the engine loop's thread, and none blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from decode.closings import Closing, PartEnd, read_closings
from decode.guard import before_changes
from decode.live import LiveRequests
from decode.metrics import DecodeMetrics
from decode.requests import DecodeRequest
from decode.reservations import RankLimits, Reservations
from decode.scheduler import DecodeScheduler
from decode.tickets import Ticket, TicketDesk
from engine.memory.block_pool import BlockPool
from kv_transfer.receiver import Arrival
from runtime.errors import TransferFailedError
from runtime.pb import common_pb2, decode_pb2
from runtime.sampling import FinishReason
from worker.lifecycle import DecodeStatus


class HandOver:
    """Requests in WAITING_FOR_KV, and the ways out of it that their writers take."""

    def __init__(
        self,
        pool: BlockPool,
        desk: TicketDesk,
        live: LiveRequests,
        *,
        scheduler: DecodeScheduler,
        reservations: Reservations,
        metrics: DecodeMetrics,
        limits: RankLimits,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._desk = desk
        self._live = live
        self._scheduler = scheduler
        self._reservations = reservations
        self._metrics = metrics
        self._limits = limits
        self._clock = clock

    def arrived(self, arrival: Arrival) -> None:
        """The KV of an allocation is complete: its request can run."""
        request = self._desk.arrive(arrival.nonce)
        self._reservations.wake()
        if request is None:
            return
        request.arrived_at = self._clock()
        inner = request.request
        self._metrics.kv_arrived(
            arrival.waited_s, inner.num_context_tokens, inner.num_cached_tokens
        )
        self._metrics.transfers.arrived(request.writer.instance, arrival.waited_s)
        error = arrival.error or TransferFailedError("the metadata record is unreadable")
        if arrival.record is not None:
            first_token, most = arrival.record.first_token, self._limits.vocab_size - 1
            if 0 <= first_token <= most:
                self._start_waiting(request, first_token, draft=arrival.record.first_draft)
                return
            # A step with it would read beyond the embedding, and end everybody's on a GPU.
            error = TransferFailedError(
                f"the metadata record of {request.writer.instance} has first token {first_token}, "
                f"and the model knows 0..{most}"
            )
        self._discard(request)
        self._live.answer(request, FinishReason.ERROR, error)

    def close_tickets(self, message: decode_pb2.CloseTicketsRequest) -> list[int]:
        """Parts of a writer close their tickets.

        Returns:
            Nonces that are not ours, or not this writer's, or long forgotten.
        """
        with before_changes("CloseTickets"):
            closings = read_closings(message)
            unknown = [item.nonce for item in closings if not item.is_known(self._desk.writer_of)]
        for closing in closings:
            if closing.nonce not in unknown:
                self._close(closing)
        self._reservations.wake()
        return unknown

    def _start_waiting(self, request: DecodeRequest, first_token: int, *, draft: int) -> None:
        inner = request.request
        inner.num_computed_tokens = inner.num_context_tokens
        inner.output_token_ids.append(first_token)
        # One that the model does not have is no guess, and harms nobody.
        inner.draft_token_ids = (draft,) if 0 <= draft < self._limits.vocab_size else ()
        num_whole = inner.num_context_tokens // self._pool.block_size
        self._pool.commit(inner.block_table[:num_whole], inner.block_hashes[:num_whole])
        reason = inner.finish_reason(self._limits.max_model_len)
        if reason is not None:
            self._discard(request)
            self._live.end_silently(request, reason)
            return
        request.move_to(DecodeStatus.WAITING)
        self._scheduler.add(request)

    def _close(self, closing: Closing) -> None:
        """Book all parts first: a request that ends then knows who may still write."""
        request = self._live.find(closing.request_id, closing.nonce)
        for part in closing.parts:
            self._desk.close_part(closing.nonce, part.rank, drained=part.is_drained)
            self._metrics.kv_received(part.num_bytes)
            self._metrics.transfers.part_closed(part)
            if request is not None:
                _merge_timings(request.timings, part.timings)
        for part in closing.parts:
            ticket = self._desk.open_ticket(closing.nonce)
            if ticket is not None:
                self._react_to_closing(ticket, part)

    def _react_to_closing(self, ticket: Ticket, part: PartEnd) -> None:
        request = ticket.request
        if part.outcome == decode_pb2.TICKET_OUTCOME_SENT:
            if ticket.is_over:
                ticket.all_sent_at = ticket.all_sent_at or self._clock()
        elif part.outcome == decode_pb2.TICKET_OUTCOME_NOT_NEEDED:
            # The router has the only token.
            self._live.withdraw(request)
            self._live.end_silently(request, FinishReason.STOP)
        elif part.outcome == decode_pb2.TICKET_OUTCOME_ABANDONED:
            self._live.end(request, FinishReason.ABORT, part.failure)
        else:
            self._live.end(request, FinishReason.ERROR, part.failure)

    def _discard(self, request: DecodeRequest) -> None:
        """Release the blocks of a request whose KV has arrived but which will not run."""
        block_ids, request.request.block_table = request.request.block_table, []
        self._pool.release(block_ids)
        request.move_to(DecodeStatus.FINISHED)


def _merge_timings(timings: common_pb2.Timings, of_part: common_pb2.Timings) -> None:
    """The slowest part counts."""
    timings.kv_transfer_s = max(timings.kv_transfer_s, of_part.kv_transfer_s)
    timings.kv_exposed_s = max(timings.kv_exposed_s, of_part.kv_exposed_s)
