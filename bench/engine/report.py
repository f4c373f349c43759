"""Numbers of repeated measurements, and how a result is written: JSON to a file or stdout."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

Report = dict[str, object]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Of repeated times, in milliseconds."""

    p10: float
    p50: float
    p90: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Quantiles:
        """Those of at least one time; between two of them, by their distance."""
        ordered = sorted(seconds)
        return cls(
            p10=quantile(ordered, 0.1) * 1e3,
            p50=quantile(ordered, 0.5) * 1e3,
            p90=quantile(ordered, 0.9) * 1e3,
            count=len(ordered),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Of repeated times, in milliseconds: how slow the slowest are."""

    p50: float
    p99: float
    p99_9: float
    max: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Tail:
        """Those of at least one time; between two of them, by their distance."""
        ordered = sorted(seconds)
        return cls(
            p50=quantile(ordered, 0.5) * 1e3,
            p99=quantile(ordered, 0.99) * 1e3,
            p99_9=quantile(ordered, 0.999) * 1e3,
            max=ordered[-1] * 1e3,
            count=len(ordered),
        )


def say(text: str, *, rank: int = 0) -> None:
    """Progress, on stderr, of rank 0 alone."""
    if rank == 0:
        print(text, file=sys.stderr, flush=True)


def append_line(report: Mapping[str, object], path: Path | None) -> None:
    """Add the report as one line to the file, or to stdout, at once."""
    text = json.dumps(report) + "\n"
    if path is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def write_report(report: Mapping[str, object], path: Path | None) -> None:
    """Write the report to the file, or to stdout."""
    text = json.dumps(report, indent=1)
    if path is None:
        print(text)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of at least one lies; between two, by their distance."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
