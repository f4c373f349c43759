"""The table of a batch: each stage's time, share, calls and bound, and what the device waited for.

Shares are of the batch's time. Where work overlaps they add up to more than the whole; what counts
then is the exposed traffic (nothing computes while it runs) and the idle time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from bench.engine.trace import Span, SpanKind, busy, gaps

_NUM_GAPS = 8
_EXPERTS = ("grouped_mlp",)
_EXPERT_ROWS = ("count_rows", "moe_align_block_size", "permute_rows", "unpermute_rows")
"""Beginnings of the names of stages."""
_US = 1e-3  # milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage of a batch.

    Attributes:
        stage: a kernel call of ours, or the name of a kernel.
        kind: compute or traffic.
        ms: sum of its spans.
        share: of the batch.
        calls: spans on the device.
        share_of_bound: least time over measured time; None if no bound is known.
    """

    stage: str
    kind: SpanKind
    ms: float
    share: float
    calls: int
    share_of_bound: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProfile:
    """Where the time of one batch went on one rank, under the profiler.

    Attributes:
        window_ms: from the first start on the device to the last end.
        compute_ms: at least one stage computed.
        traffic_ms: data moved between ranks.
        exposed_traffic_ms: it moved and nothing computed.
        idle_ms: nothing ran.
        num_spans: kernels and copies.
        stages: longest first.
        longest_gaps: of the idle time, with the stages around them.
    """

    window_ms: float
    compute_ms: float
    traffic_ms: float
    exposed_traffic_ms: float
    idle_ms: float
    num_spans: int
    stages: list[StageRow]
    longest_gaps: list[dict[str, str | float]]

    def bubbles_ms(self, batch_ms: float) -> dict[str, float]:
        """Idle time of the device, as the profiler saw it and without its cost.

        The profiler slows the host down, so its idle time is too long where the host is the limit;
        what a batch takes without it, less what its kernels take, is the other estimate.
        """
        return {
            "profiled": self.idle_ms,
            "batch_less_busy": max(batch_ms - (self.window_ms - self.idle_ms), 0.0),
        }


def experts_ms(profile: BatchProfile) -> dict[str, float]:
    """Return what routed experts took of a batch: their GEMMs, and laying rows out for them."""

    def sum_of(names: tuple[str, ...]) -> float:
        return sum(row.ms for row in profile.stages if row.stage.startswith(names))

    return {"gemms": sum_of(_EXPERTS), "rows": sum_of(_EXPERT_ROWS)}


def summarise(spans: Sequence[Span], bounds_s: Mapping[str, float]) -> BatchProfile:
    """Make the table.

    Args:
        spans: of one batch, by start; at least one.
        bounds_s: least seconds of a stage, where known.
    """
    window = max(span.end for span in spans) - spans[0].start
    compute = [span for span in spans if span.kind is SpanKind.COMPUTE]
    traffic = [span for span in spans if span.kind is SpanKind.TRAFFIC]
    whole, computing = busy(spans), busy(compute)
    return BatchProfile(
        window_ms=window * _US,
        compute_ms=computing * _US,
        traffic_ms=busy(traffic) * _US,
        exposed_traffic_ms=(whole - computing) * _US,
        idle_ms=(window - whole) * _US,
        num_spans=len(spans),
        stages=_rows(spans, window, bounds_s),
        longest_gaps=[
            {"ms": (gap.end - gap.start) * _US, "after": gap.after, "before": gap.before}
            for gap in gaps(spans)[:_NUM_GAPS]
        ],
    )


def _rows(spans: Sequence[Span], window: float, bounds_s: Mapping[str, float]) -> list[StageRow]:
    def key(span: Span) -> tuple[str, SpanKind]:
        return span.stage, span.kind

    rows = []
    for (stage, kind), members in groupby(sorted(spans, key=key), key=key):
        times = [span.end - span.start for span in members]
        bound = bounds_s.get(stage)
        rows.append(
            StageRow(
                stage=stage,
                kind=kind,
                ms=sum(times) * _US,
                share=sum(times) / window if window else 0.0,
                calls=len(times),
                share_of_bound=bound * 1e6 / sum(times) if bound and sum(times) else None,
            )
        )
    return sorted(rows, key=lambda row: -row.ms)


def format_table(profile: BatchProfile, num_rows: int | None = None) -> str:
    """The profile as aligned text, one line a stage."""
    lines = [
        f"window {profile.window_ms:.3f} ms, computing {profile.compute_ms:.3f}, "
        f"traffic {profile.traffic_ms:.3f} (exposed {profile.exposed_traffic_ms:.3f}), "
        f"idle {profile.idle_ms:.3f}; {profile.num_spans} kernels and copies",
        f"{'stage':44} {'ms':>10} {'share':>7} {'calls':>6} {'of bound':>9}",
    ]
    for row in profile.stages[:num_rows]:
        bound = f"{row.share_of_bound:9.1%}" if row.share_of_bound is not None else f"{'-':>9}"
        lines.append(f"{row.stage:44.44} {row.ms:10.3f} {row.share:7.1%} {row.calls:6d} {bound}")
    for gap in profile.longest_gaps:
        lines.append(f"gap {gap['ms']:.3f} ms between {gap['after']} and {gap['before']}")
    return "\n".join(lines)
