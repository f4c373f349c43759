"""What a trace says at a glance: how even it is, its worst layer, its hottest experts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experts.balancedness import Balancedness, balancedness_of, even_placement, rank_rows
from experts.noise_floor import Routing, noise_floor
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from experts.trace import ExpertTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class HotExpert:
    """One expert of one layer.

    Attributes:
        layer: of the MoE layers, from 0.
        expert: its logical number.
        tokens: that chose it, over the whole trace.
        times_mean: its tokens over those of the layer's mean expert.
    """

    layer: int
    expert: int
    tokens: int
    times_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """How even a trace is on ranks that hold its experts in order.

    Attributes:
        now: of the trace.
        floor: of uniform routing with the same batch, layers and ranks.
        hottest: experts with most tokens against their layer's mean, hottest first.
    """

    now: Balancedness
    floor: Balancedness
    hottest: tuple[HotExpert, ...]

    def describe(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def routing_of(trace: ExpertTrace) -> Routing:
    """The rule by which tokens of the trace chose."""
    return Routing(
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        num_groups=trace.num_groups,
        topk_group=trace.topk_group,
    )


def floor_of(trace: ExpertTrace, *, num_ranks: int, num_slots: int) -> Balancedness:
    """The noise floor of rows like the trace's.

    A row of several passes is held against rows of as many tokens.
    """
    return noise_floor(
        routing_of(trace),
        tokens_per_pass=trace.tokens_per_pass * trace.passes_per_row,
        num_ranks=num_ranks,
        num_slots=num_slots,
        num_layers=trace.num_layers,
        num_passes=trace.num_rows,
    )


def summarise(trace: ExpertTrace, *, num_ranks: int, num_hottest: int) -> TraceSummary:
    """Measure a trace.

    Raises:
        ConfigError: the experts cannot be dealt evenly to the ranks, or the trace is empty.
    """
    experts = trace.num_experts
    if num_ranks < 1 or experts % num_ranks:
        fixes = [n for n in range(1, experts + 1) if experts % n == 0]
        fix = f"one of {', '.join(map(str, fixes))}, or simulate with redundant experts"
        raise ConfigError("--ranks", num_ranks, f"{experts} experts are not dealt evenly", fix)
    check_not_empty(trace)
    placement = np.tile(even_placement(experts, experts, num_ranks), (trace.num_layers, 1))
    sums_LE = trace.counts_NLE.sum(axis=0)
    times_LE = sums_LE / np.maximum(sums_LE.mean(axis=1, keepdims=True), 1e-9)
    order = np.argsort(-times_LE, axis=None, kind="stable")[:num_hottest]
    hottest = tuple(
        HotExpert(
            layer=int(layer),
            expert=int(expert),
            tokens=int(sums_LE[layer, expert]),
            times_mean=float(times_LE[layer, expert]),
        )
        for layer, expert in zip(*np.unravel_index(order, times_LE.shape), strict=True)
    )
    return TraceSummary(
        now=balancedness_of(rank_rows(trace.counts_NLE, placement, num_ranks)),
        floor=floor_of(trace, num_ranks=num_ranks, num_slots=experts),
        hottest=hottest,
    )


def describe_trace(trace: ExpertTrace) -> dict[str, Any]:
    """What a trace is of, for programs."""
    return {
        "model": trace.model_name,
        "role": trace.role,
        "layers": trace.num_layers,
        "experts": trace.num_experts,
        "top_k": trace.top_k,
        "rows": trace.num_rows,
        "passes_per_row": trace.passes_per_row,
        "tokens_per_pass": trace.tokens_per_pass,
        "recorded_ranks": trace.num_ranks,
        "recorded_hosts": trace.num_hosts,
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankLoad:
    """How even ranks are where their experts stand.

    Attributes:
        times_mean_LR: [L, R] float64, rows that came to each rank over the mean of the layer: 1 is
            even, and what is over 1 is what others wait for. 1 in a layer without a row.
        now: of the rows.
        floor: of uniform routing with the same batch and ranks, and as many slots dealt evenly.
    """

    times_mean_LR: NDArray[np.float64]
    now: Balancedness
    floor: Balancedness

    def describe(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "times_mean": self.times_mean_LR.round(4).tolist(),
            "now": asdict(self.now),
            "floor": asdict(self.floor),
        }


def rank_load(trace: ExpertTrace, placement_LP: NDArray[np.int64]) -> RankLoad:
    """Measure a trace on the R ranks that were recorded.

    Args:
        trace: of one instance.
        placement_LP: [L, P], the expert of each slot; ranks have equally many slots, in order.
    """
    num_ranks = trace.num_ranks
    rows_NLR = rank_rows(trace.counts_NLE, placement_LP, num_ranks)
    sums_LR = rows_NLR.sum(axis=0)
    means_L1 = sums_LR.mean(axis=1, keepdims=True)
    return RankLoad(
        times_mean_LR=np.divide(sums_LR, means_L1, out=np.ones_like(sums_LR), where=means_L1 > 0),
        now=balancedness_of(rows_NLR),
        floor=floor_of(trace, num_ranks=num_ranks, num_slots=placement_LP.shape[1]),
    )


def check_not_empty(trace: ExpertTrace) -> None:
    """Refuse a trace that nothing can be planned from.

    Raises:
        ConfigError: it has no tokens.
    """
    if not int(trace.counts_NLE.sum()):
        problem = f"{trace.num_rows} rows without a token"
        raise ConfigError("TRACE", problem, "nothing was recorded", "record it under load")
