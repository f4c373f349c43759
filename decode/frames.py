"""The news of one step, by router: what the engine loop's thread says, and `outboxes` delivers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runtime.errors import TandemError
from runtime.pb import common_pb2, decode_pb2
from runtime.rpc.wire import error_to_proto, finish_reason_to_proto, logprobs_to_proto
from runtime.sampling import FinishReason, PositionLogprobs

_DELTA_BYTES = 256
_TOKEN_BYTES = 16
_LOGPROB_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """News of one request in one step.

    Attributes:
        request_id: whose.
        row_id: its name in the rows of frames; 0: the router reads none.
        start_index: output index of the first of `token_ids`.
        token_ids: new output tokens; empty if the request only ends.
        logprobs: empty, or one per token.
        finish_reason: set in the last delta of a request.
        error: why, with ERROR and ABORT.
        timings: with the first delta and with the last.
        num_cached_tokens: tokens of the context that this rank's prefix cache gave.
        num_drafts: that the step of these tokens verified.
        is_silent: the router knows; the delta only ends the request in our books.
    """

    request_id: str
    start_index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: TandemError | None = None
    timings: common_pb2.Timings | None = None
    num_cached_tokens: int = 0
    num_drafts: int = 0
    is_silent: bool = False
    row_id: int = 0

    @property
    def end_index(self) -> int:
        """Output index after its last token."""
        return self.start_index + len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """About what keeping it takes."""
        num_top = sum(1 + len(item.top_ids) for item in self.logprobs)
        return _DELTA_BYTES + _TOKEN_BYTES * len(self.token_ids) + _LOGPROB_BYTES * num_top

    @property
    def is_row(self) -> bool:
        """Whether it can be told in a row: it says tokens and nothing else."""
        return (
            bool(self.row_id and self.token_ids)
            and not self.logprobs
            and self.finish_reason is None
            and self.error is None
            and self.timings is None
        )

    def to_proto(self) -> decode_pb2.TokenDelta:
        """The message of the wire."""
        error = None if self.error is None else error_to_proto(self.error, self.request_id)
        return decode_pb2.TokenDelta(
            request_id=self.request_id,
            start_index=self.start_index,
            token_ids=self.token_ids,
            logprobs=[logprobs_to_proto(item) for item in self.logprobs],
            finish_reason=finish_reason_to_proto(self.finish_reason),
            error=error,
            timings=self.timings,
            num_cached_tokens=self.num_cached_tokens,
            num_drafts=self.num_drafts,
        )


def fill_frame(frame: decode_pb2.Frame, deltas: Iterable[Delta]) -> None:
    """Put the news of one or more steps into `frame`, which has none: as rows where that can be."""
    rows: list[Delta] = []
    told: set[str] = set()
    """Whose news come as deltas: what follows must not overtake them."""
    for delta in deltas:
        if delta.is_row and delta.request_id not in told:
            rows.append(delta)
        else:
            told.add(delta.request_id)
            frame.deltas.append(delta.to_proto())
    if not rows:
        return
    columns = frame.rows
    columns.row_ids.extend([row.row_id for row in rows])
    columns.start_indexes.extend([row.start_index for row in rows])
    token_ids = [token_id for row in rows for token_id in row.token_ids]
    columns.token_ids.extend(token_ids)
    if len(token_ids) > len(rows):
        columns.num_tokens.extend([len(row.token_ids) for row in rows])
    num_drafts = [row.num_drafts for row in rows]
    if any(num_drafts):
        columns.num_drafts.extend(num_drafts)


class StepNews:
    """The deltas of the present step by router. Belongs to the engine loop's thread."""

    def __init__(self) -> None:
        self._deltas: defaultdict[str, list[Delta]] = defaultdict(list)

    def add(self, router_id: str, delta: Delta) -> None:
        """Append a delta of one of the router's requests."""
        self._deltas[router_id].append(delta)

    def take(self) -> Mapping[str, list[Delta]]:
        """Return all since the last call, by router."""
        deltas, self._deltas = self._deltas, defaultdict(list)
        return deltas
