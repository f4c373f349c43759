"""Where the time to the first token went, of requests that ended lately.

Parts of percentiles do not add up. So the row of a percentile is the mean of the requests around
it: its parts add up to its time, and they are of requests that were about so slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.pool.members import WorkerKey
from router.requests.generation import Generation
from router.requests.timings import RequestTimings

MAX_FINISHED = 256
WINDOW_S = 300.0
MAX_SLOWEST = 8
PARTS = ("router", "reserve", "prefill_queue", "compute", "other", "transfer", "first_decode")
"""The first five add up to the time to the first token; the last two are on the way to the second:
what was left of the transfer, and decode's queue. ``other``: network, and pauses between chunks."""
NUM_BEFORE_FIRST = 5
PERCENTILES = (("p50", 0.45, 0.55), ("p90", 0.85, 0.95), ("p99", 0.985, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One choice that got its tokens. Its text is not here."""

    request_id: str
    model: str
    key_name: str
    """Of its API key; "" where none is asked for."""
    at: float
    """Wall clock of its end."""
    ttft_s: float
    total_s: float
    parts_s: Sequence[float]
    """As in ``PARTS``."""
    num_prompt_tokens: int
    num_output_tokens: int
    prefill: str
    decode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftRow:
    """The requests around one percentile."""

    name: str
    ttft_s: float
    parts_s: Sequence[float]


class _Kept(NamedTuple):
    """What is needed of a generation that has ended; it is worked out for who looks."""

    request_id: str
    model: str
    key_name: str
    at: float
    timings: RequestTimings
    num_prompt_tokens: int
    num_output_tokens: int
    workers: tuple[WorkerKey, WorkerKey]

    @property
    def ttft_s(self) -> float:
        return max(0.0, self.timings.first_token - self.timings.received)


def _finished_from(kept: _Kept) -> Finished | None:
    """None of one that had not ended by itself."""
    split = kept.timings.told()
    if "total_s" not in split:
        return None
    ttft_s = split.get("ttft_s", 0.0)
    names = ("router_s", "reserve_s", "prefill_queue_s", "prefill_compute_s")
    known = [split.get(name, 0.0) for name in names]
    other = max(0.0, ttft_s - sum(known))
    after = [split.get("kv_exposed_s", 0.0), split.get("decode_admission_s", 0.0)]
    return Finished(
        request_id=kept.request_id,
        model=kept.model,
        key_name=kept.key_name,
        at=kept.at,
        ttft_s=ttft_s,
        total_s=split["total_s"],
        parts_s=[round(part, 6) for part in (*known, other, *after)],
        num_prompt_tokens=kept.num_prompt_tokens,
        num_output_tokens=kept.num_output_tokens,
        prefill=str(kept.workers[0]),
        decode=str(kept.workers[1]),
    )


class FinishedRequests:
    """The last of them, of one process."""

    def __init__(self) -> None:
        self._items: deque[Finished] = deque(maxlen=MAX_FINISHED)
        self._fresh: deque[_Kept] = deque(maxlen=MAX_FINISHED)
        """Those that nobody has looked at yet."""

    def add(self, generation: Generation, at: float, model: str) -> None:
        """One choice has ended, in whatever way; one without tokens is not kept."""
        num_tokens, workers = generation.num_tokens, generation.workers
        if num_tokens and workers is not None and generation.timings.ended:
            num_prompt = len(generation.prompt_token_ids)
            kept = _Kept(
                *(generation.request_id, model, generation.key_name, at, generation.timings),
                *(num_prompt, num_tokens, workers),
            )
            self._fresh.append(kept)

    def ttfts_since(self, at: float) -> list[float]:
        """Times to the first token of those that ended after wall clock ``at``; nothing else is
        worked out for them.
        """
        seen = [item.ttft_s for item in self._items if item.at > at]
        return seen + [kept.ttft_s for kept in self._fresh if kept.at > at]

    def since(self, at: float) -> list[Finished]:
        """Those that ended after wall clock ``at``, oldest first."""
        while self._fresh:
            finished = _finished_from(self._fresh.popleft())
            if finished is not None:
                self._items.append(finished)
        return [item for item in self._items if item.at > at]


def percentile_rows(finished: Sequence[Finished]) -> list[TtftRow]:
    """One row a percentile; empty without requests."""
    ordered = sorted(finished, key=lambda item: item.ttft_s)
    rows = []
    for name, low, high in PERCENTILES if ordered else ():
        first = min(int(low * len(ordered)), len(ordered) - 1)
        around = ordered[first : max(first + 1, round(high * len(ordered)))]
        columns = zip(*(item.parts_s for item in around), strict=True)
        parts_s = [round(sum(column) / len(around), 6) for column in columns]
        ttft_s = sum(item.ttft_s for item in around) / len(around)
        rows.append(TtftRow(name=name, ttft_s=round(ttft_s, 6), parts_s=parts_s))
    return rows


def slowest(finished: Sequence[Finished]) -> list[Finished]:
    """Those that waited longest for their first token, the slowest first."""
    return sorted(finished, key=lambda item: -item.ttft_s)[:MAX_SLOWEST]


def median_of(ttfts_s: Sequence[float]) -> float:
    """0 without requests."""
    ordered = sorted(ttfts_s)
    return ordered[len(ordered) // 2] if ordered else 0.0
