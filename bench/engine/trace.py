"""Reads a profiler's trace: what ran on the device, for which stage, and when nothing did.

The trace is in Chrome's format, as torch writes it. A kernel belongs to the innermost range that
was open on the host when it was launched (`bench.stage_timer` opens one around each call of ours);
without such a range it goes by its own name, shortened. The key idea: time is measured by unions of
intervals, because work on several streams overlaps, and sums then say nothing about the whole.

Times are in microseconds. Without a device (on a CPU) the ranges themselves are the spans.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bench.stage_timer import TRAFFIC_MARK

_ON_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_LAUNCHES = frozenset(("cuda_runtime", "cuda_driver"))
_RANGES = "user_annotation"
_TRAFFIC_NAMES = re.compile(r"nccl|deep_ep|nvshmem|PtoP|symm", re.IGNORECASE)
_TEMPLATE = re.compile(r"<[^<>]*>")
_MAX_NAME = 60
_LIBRARY_RANGES = ("nccl:", "gloo:")  # torch's own, inside of ours

Event = Mapping[str, Any]
Interval = tuple[float, float]


class SpanKind(StrEnum):
    """Whether a span computes or moves data between ranks."""

    COMPUTE = "compute"
    TRAFFIC = "traffic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One kernel or copy on the device; ``kernel`` is its whole name, empty for a range."""

    stage: str
    kernel: str = ""
    kind: SpanKind
    start: float
    end: float
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time in which the device did nothing, between two stages."""

    start: float
    end: float
    after: str
    before: str


def read_spans(
    events: Sequence[Event], within: str, names: Mapping[str, str] | None = None
) -> list[Span]:
    """Return what was launched inside the range named ``within``, by start.

    Args:
        events: of the trace.
        within: name of a range, which is open once.
        names: stages of kernels that no range names, because a graph has launched them.

    Raises:
        ValueError: there is no such range.
    """
    ranges = [event for event in events if event.get("cat") == _RANGES]
    outer = next((event for event in ranges if event["name"] == within), None)
    if outer is None:
        raise ValueError(f"the trace holds no range {within!r}; profile inside record_function")
    first, last = _interval(outer)
    inner = [
        event
        for event in ranges
        if event is not outer
        and first <= event["ts"] <= last
        and not event["name"].startswith(_LIBRARY_RANGES)
    ]
    kernels = [event for event in events if event.get("cat") in _ON_DEVICE]
    if not kernels:
        return [_range_span(event) for event in _outermost(inner)]
    launches = [
        event
        for event in events
        if event.get("cat") in _LAUNCHES
        and first <= event["ts"] <= last
        and "correlation" in event.get("args", {})
    ]
    found, known = _innermost(inner, launches), names or {}
    spans = [
        _kernel_span(event, found[correlation] or known.get(event["name"]))
        for event in kernels
        if (correlation := event.get("args", {}).get("correlation")) in found
    ]
    return sorted(spans, key=lambda span: span.start)


def stage_names(spans: Iterable[Span]) -> dict[str, str]:
    """The stage of each kernel that belongs to one stage alone, by its whole name."""
    stages: dict[str, set[str]] = {}
    for span in spans:
        stages.setdefault(span.kernel, set()).add(span.stage)
    return {kernel: found.pop() for kernel, found in stages.items() if len(found) == 1}


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that touch; ascending and disjoint."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def busy(spans: Iterable[Span]) -> float:
    """How long at least one of them ran."""
    return sum(end - start for start, end in union((span.start, span.end) for span in spans))


def gaps(spans: Sequence[Span]) -> list[Gap]:
    """The times between the first start and the last end in which nothing ran, longest first.

    Args:
        spans: by start.
    """
    found, last = [], None
    for span in spans:
        if last is not None and span.start > last.end:
            found.append(Gap(start=last.end, end=span.start, after=last.stage, before=span.stage))
        if last is None or span.end > last.end:
            last = span
    return sorted(found, key=lambda gap: gap.start - gap.end)


def short_name(name: str) -> str:
    """A kernel's name without its template arguments, return type and parameters."""
    while (shorter := _TEMPLATE.sub("", name)) != name:
        name = shorter
    name = name.split("(")[0].strip() or name
    return name.removeprefix("void ").strip()[:_MAX_NAME]


def _interval(event: Event) -> Interval:
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0.0))


def _outermost(ranges: Sequence[Event]) -> Iterator[Event]:
    end = float("-inf")
    for event in sorted(ranges, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= end:
            end = _interval(event)[1]
            yield event


def _range_span(event: Event) -> Span:
    start, end = _interval(event)
    return Span(stage=event["name"], kind=_kind(event["name"], ""), start=start, end=end)


def _kernel_span(event: Event, stage: str | None) -> Span:
    start, end = _interval(event)
    return Span(
        stage=stage or short_name(event["name"]),
        kernel=event["name"],
        kind=_kind(stage or "", event["name"]),
        start=start,
        end=end,
        stream=int(event.get("args", {}).get("stream", 0)),
    )


def _kind(stage: str, kernel: str) -> SpanKind:
    is_traffic = stage.startswith(TRAFFIC_MARK) or _TRAFFIC_NAMES.search(kernel)
    return SpanKind.TRAFFIC if is_traffic else SpanKind.COMPUTE


def _innermost(ranges: Sequence[Event], launches: Sequence[Event]) -> dict[int, str | None]:
    """The name of the innermost range around each launch on its thread, by correlation."""
    names: dict[int, str | None] = {}
    open_ranges: dict[object, list[Event]] = {}
    for event, is_launch in _by_time(ranges, launches):
        stack = open_ranges.setdefault(event["tid"], [])
        while stack and _interval(stack[-1])[1] < event["ts"]:
            stack.pop()
        if is_launch:
            names[event["args"]["correlation"]] = stack[-1]["name"] if stack else None
        else:
            stack.append(event)
    return names


def _by_time(ranges: Sequence[Event], launches: Sequence[Event]) -> Iterator[tuple[Event, bool]]:
    """Ranges (False) and launches (True) by their start, a longer range before a shorter one."""
    both = [(event, False) for event in ranges] + [(event, True) for event in launches]
    yield from sorted(both, key=lambda pair: (pair[0]["ts"], pair[1], -pair[0].get("dur", 0.0)))
