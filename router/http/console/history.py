"""The last five minutes, a point every five seconds: for who opens the page in the middle of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from router.http.console.part import Point

STEP_S = 5.0
NUM_POINTS = 60

Series = list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPoint:
    """What all processes see alike, at one point."""

    number: int
    prompt_tokens_s: float
    output_tokens_s: float
    transfer_s: float
    """Bytes a second, of all pairs."""
    prefill_kv: float | None
    """Share of the blocks in use; None without workers."""
    decode_kv: float | None
    worker_tokens_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView:
    """As the page gets it: series of ``NUM_POINTS`` values, the newest last; None: unknown."""

    step_s: float
    number: int
    """Of the newest point."""
    series: Mapping[str, Series]
    workers: Mapping[str, Series]
    """Tokens a second."""


def number_at(wall: float) -> int:
    """The point that wall clock ``wall`` belongs to."""
    return int(wall // STEP_S)


class History:
    """Of one process: its own points, and those of the pool."""

    def __init__(self) -> None:
        self._own: deque[Point] = deque(maxlen=NUM_POINTS)
        self._pool: deque[PoolPoint] = deque(maxlen=NUM_POINTS)

    def add(self, own: Point, pool: PoolPoint) -> None:
        """One more point of each, of the same number."""
        self._own.append(own)
        self._pool.append(pool)

    def own(self) -> list[Point]:
        """What this process alone knows, oldest first."""
        return list(self._own)

    def view(self, number: int, parts: Sequence[Sequence[Point]]) -> HistoryView:
        """Up to point ``number``; ``parts`` are the points of all processes, ours included."""
        pool = {point.number: point for point in self._pool}
        own: dict[int, list[Point]] = {}
        for part in parts:
            for point in part:
                own.setdefault(point.number, []).append(point)
        numbers = range(number - NUM_POINTS + 1, number + 1)

        def of_pool(read: Callable[[PoolPoint], float | None]) -> Series:
            return [_rounded(read(pool[n])) if n in pool else None for n in numbers]

        def of_all(read: Callable[[list[Point]], float | None]) -> Series:
            return [_rounded(read(own[n])) if n in own else None for n in numbers]

        series = {
            "output": of_pool(lambda p: p.output_tokens_s),
            "prompt": of_pool(lambda p: p.prompt_tokens_s),
            "transfer": of_pool(lambda p: p.transfer_s),
            "prefill_kv": of_pool(lambda p: p.prefill_kv),
            "decode_kv": of_pool(lambda p: p.decode_kv),
            "in_flight": of_all(lambda all_: sum(p.num_in_flight for p in all_)),
            "waiting": of_all(lambda all_: sum(p.num_waiting for p in all_)),
            "answers": of_all(lambda all_: sum(p.num_answers for p in all_) / STEP_S),
            "errors": of_all(lambda all_: sum(p.num_errors for p in all_)),
            "ttft": of_all(_median_ttft_s),
        }
        names = sorted({name for point in self._pool for name in point.worker_tokens_s})
        workers = {
            name: [
                _rounded(pool[n].worker_tokens_s.get(name)) if n in pool else None for n in numbers
            ]
            for name in names
        }
        return HistoryView(step_s=STEP_S, number=number, series=series, workers=workers)


def _median_ttft_s(points: list[Point]) -> float | None:
    """The mean of the processes' medians, by how many requests each had."""
    num = sum(point.num_finished for point in points)
    if not num:
        return None
    return sum(point.median_ttft_s * point.num_finished for point in points) / num


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4 if value < 10 else 1)
