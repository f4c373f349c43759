"""Rows of frames: tokens of which there is nothing else to say, on their way to their requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Protocol

from runtime.errors import InternalError
from runtime.pb import decode_pb2


class RowSink(Protocol):
    """A request that waits for tokens."""

    def on_token(self, index: int, token_id: int, now: float) -> None:
        """One output token, at ``now`` of the event loop's clock, and nothing else."""

    def on_tokens(
        self, start_index: int, token_ids: list[int], now: float, num_drafts: int
    ) -> None:
        """The same of several, of a step that verified ``num_drafts``."""


class RowSinks:
    """The requests of one stream, by the names that its rows have for them."""

    def __init__(
        self,
        row_ids: Iterator[int],
        clock: Callable[[], float],
        on_failure: Callable[[str, Exception], None],
    ) -> None:
        """``on_failure``: a request's sink could not be told, because of this."""
        self._next_row_ids = row_ids
        self._clock = clock
        self._on_failure = on_failure
        self._row_ids: dict[str, int] = {}
        """By request id."""
        self._sinks: dict[int, RowSink] = {}

    def attach(self, request_id: str, sink: RowSink) -> int:
        """Send the tokens of ``request_id`` to ``sink``; returns what rows are to call it."""
        row_id = self._row_ids[request_id] = next(self._next_row_ids)
        self._sinks[row_id] = sink
        return row_id

    def detach(self, request_id: str) -> None:
        """Send them no more."""
        self._sinks.pop(self._row_ids.pop(request_id, 0), None)

    def deliver(self, rows: decode_pb2.TokenRows) -> None:
        """One pass over the columns; rows of requests that are gone are dropped.

        Raises:
            InternalError: the columns are not of one length.
        """
        # Lists: every use of protobuf's own containers costs more than a token's text.
        row_ids, indexes, token_ids = rows.row_ids[:], rows.start_indexes[:], rows.token_ids[:]
        num_tokens, num_drafts = rows.num_tokens[:], rows.num_drafts[:]
        in_all = sum(num_tokens) if num_tokens else len(row_ids)
        lengths = len(row_ids), len(indexes), len(num_tokens or row_ids), len(num_drafts or row_ids)
        if len(set(lengths)) > 1 or len(token_ids) != in_all:
            raise InternalError(
                f"decode sent rows whose columns do not fit together: {len(row_ids)} ids, "
                f"{len(indexes)} indexes, {len(num_tokens)} lengths, {len(num_drafts)} numbers of "
                f"drafts, {len(token_ids)} tokens"
            )
        if num_tokens or num_drafts:
            counts = num_tokens or repeat(1, len(row_ids)), num_drafts or repeat(0, len(row_ids))
            self._deliver_many(zip(row_ids, indexes, *counts, strict=True), token_ids)
            return
        sinks, now = self._sinks, self._clock()
        for row_id, index, token_id in zip(row_ids, indexes, token_ids, strict=True):
            sink = sinks.get(row_id)
            if sink is None:
                continue
            try:
                sink.on_token(index, token_id, now)
            except Exception as error:  # of this request alone
                self._fail(row_id, error)

    def _deliver_many(
        self, rows: Iterable[tuple[int, int, int, int]], token_ids: list[int]
    ) -> None:
        """Rows of (id, index of the first token, number of tokens, of drafts)."""
        end, now = 0, self._clock()
        for row_id, index, num_tokens, num_drafts in rows:
            begin, end = end, end + num_tokens
            sink = self._sinks.get(row_id)
            if sink is None:
                continue
            try:
                sink.on_tokens(index, token_ids[begin:end], now, num_drafts)
            except Exception as error:  # of this request alone
                self._fail(row_id, error)

    def _fail(self, row_id: int, error: Exception) -> None:
        request_id = next(name for name, its_row in self._row_ids.items() if its_row == row_id)
        self._on_failure(request_id, error)
