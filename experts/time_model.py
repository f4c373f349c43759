"""What a placement costs in time: the objective of plans, because tokens are not time.

In a MoE layer a rank reads the weights of each expert that has rows (its *active* experts) and
computes its rows, whichever takes longer, and its rows travel:

    rank  = max(active x s_per_active, rows x s_per_row) + rows x s_per_travelled_row
    layer = the slowest rank;  pass = the sum over layers, and whatever is outside experts

With 44.04 MB an expert at 4.3 TB/s an active expert takes 10.2 us, a row (6 x 7168 x 2048
operations at 1385 TFLOP/s) 0.064 us: below 161 rows an expert, which is all of decode on 8 ranks,
rows cost nothing and one more copy costs 10.2 us; above, in prefill, rows are all.

A token's row goes once to each *rank* that holds some of its experts, so where experts stand
together matters. How many ranks that are is estimated from the share rho of pairs of a token's
experts that stand together, as if it chose among 1 / rho equal ranks: n (1 - (1 - 1/n)^K) for
n = 1 / rho. It is 3.6 of 8 ranks for the eight experts in four of eight groups of DeepSeek-V3 in
order, and 5.3 where groups are torn apart.

Rates are those of `experts.gpu_rates`. Where the time of a whole pass was measured, it has
the last word (`TimeModel.fitted`).

Letters in shapes: N rows of a window, L MoE layers, E experts, P slots, R ranks, H hosts, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from experts.balancedness import copies_of, slot_rows
from experts.gpu_rates import H200

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from experts.gpu_rates import GpuRates
    from experts.trace import ExpertTrace

_FP8_GROUP: Final = 128
"""Numbers of a row in FP8 that share a float32 scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Seconds of the parts of a pass.

    Attributes:
        s_per_active: to read the weights of one expert.
        s_per_row: to compute one row of one expert.
        s_per_link_row: for a token to travel to one rank of its host and its result back.
        s_per_network_row: the same to another host, once for each host.
        s_per_link_move: to copy one expert to another rank of its host.
        s_per_network_move: to another host.
        other_s_per_pass: of a pass outside experts. 0.0: gains are of the experts' part alone.
        top_k: experts of a token.
        num_groups: of neighbouring experts.
        topk_group: groups that a token's experts lie in.
    """

    s_per_active: float
    s_per_row: float
    s_per_link_row: float
    s_per_network_row: float
    s_per_link_move: float
    s_per_network_move: float
    other_s_per_pass: float = 0.0
    top_k: int
    num_groups: int = 1
    topk_group: int = 1

    @classmethod
    def of_trace(
        cls, trace: ExpertTrace, rates: GpuRates = H200, *, other_s_per_pass: float = 0.0
    ) -> TimeModel:
        """Take the experts' sizes from a trace and the speeds from a GPU.

        A row leaves in the numbers of the experts' weights, in FP8 with a scale for every 128, and
        comes home in bfloat16 or what is wider.
        """
        hidden, inner = trace.hidden_size, trace.moe_intermediate_size
        # Scales are a thousandth of the weights.
        width = max(round(trace.expert_bytes / (3 * hidden * inner)), 1)
        is_fp8 = width == 1
        out_bytes = hidden + 4 * -(-hidden // _FP8_GROUP) if is_fp8 else width * hidden
        row_bytes = out_bytes + max(width, 2) * hidden
        flops = rates.flops if is_fp8 else rates.wide_flops
        return cls(
            s_per_active=trace.expert_bytes / rates.memory,
            s_per_row=6 * hidden * inner / flops,
            s_per_link_row=row_bytes / rates.link,
            s_per_network_row=row_bytes / rates.network,
            s_per_link_move=trace.expert_bytes / rates.link,
            s_per_network_move=trace.expert_bytes / rates.network,
            other_s_per_pass=other_s_per_pass,
            top_k=trace.top_k,
            num_groups=trace.num_groups,
            topk_group=trace.topk_group,
        )

    def fitted(self, experts_s: float, pass_s: float) -> TimeModel:
        """Return the model that makes whole passes as long as they were measured.

        What a pass takes beyond its experts is outside experts. Where it takes less than they would
        by the model, the model is too slow: all that it says of a pass shrinks, and nothing is
        outside experts. What moves take stays.

        Args:
            experts_s: by this model of the experts' part of a pass, as experts stood, above 0.
            pass_s: that was measured, above 0.
        """
        if pass_s >= experts_s:
            return replace(self, other_s_per_pass=pass_s - experts_s)
        share = pass_s / experts_s
        return replace(
            self,
            s_per_active=self.s_per_active * share,
            s_per_row=self.s_per_row * share,
            s_per_link_row=self.s_per_link_row * share,
            s_per_network_row=self.s_per_network_row * share,
            other_s_per_pass=0.0,
        )

    def layer_seconds(
        self,
        counts_NLE: NDArray[np.int64],
        placement_LP: NDArray[np.int64],
        *,
        num_ranks: int,
        num_hosts: int = 1,
        passes_per_row: int = 1,
        coactivation_LEE: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float64]:
        """Return [L] float64, the seconds of each layer's slowest rank in the mean pass."""
        slots_LPN = slot_rows(counts_NLE, placement_LP)
        if passes_per_row > 1:
            slots_LPN /= passes_per_row
        # Of one pass it is known who has rows: fewer rows than copies reach so many of them. Of a
        # mean pass of several it is not; rows come as by Poisson.
        active_LPN = np.minimum(slots_LPN, 1) if passes_per_row == 1 else -np.expm1(-slots_LPN)
        layers, num_slots, rows = slots_LPN.shape
        by_rank = (layers, num_ranks, num_slots // num_ranks, rows)
        rows_LRN = slots_LPN.reshape(by_rank).sum(axis=2)
        active_LRN = active_LPN.reshape(by_rank).sum(axis=2)
        work_LRN = np.maximum(active_LRN * self.s_per_active, rows_LRN * self.s_per_row)
        travel_L = self._travel_seconds(
            counts_NLE.sum(axis=0), placement_LP, num_ranks, num_hosts, coactivation_LEE
        )
        times_LRN = work_LRN + rows_LRN * travel_L[:, None, None]
        seconds: NDArray[np.float64] = times_LRN.max(axis=1).mean(axis=1)
        return seconds

    def _travel_seconds(
        self,
        load_LE: NDArray[np.int64],
        placement_LP: NDArray[np.int64],
        num_ranks: int,
        num_hosts: int,
        coactivation_LEE: NDArray[np.int64] | None,
    ) -> NDArray[np.float64]:
        """Return [L], seconds for each row of an expert: its share of its token's travels."""
        per_host = num_ranks // num_hosts
        seconds_L = np.zeros(len(load_LE))
        for parts, seconds, stay in (
            (num_ranks, self.s_per_link_row, per_host),
            (num_hosts, self.s_per_network_row, num_hosts),
        ):
            if parts > 1:
                together_L = self.together(load_LE, placement_LP, parts, coactivation_LEE)
                visited_L = visited_parts(together_L, self.top_k)
                seconds_L += visited_L / self.top_k * seconds * (stay - 1) / stay
        return seconds_L

    def together(
        self,
        load_LE: NDArray[np.int64],
        placement_LP: NDArray[np.int64],
        num_parts: int,
        coactivation_LEE: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float64]:
        """Return [L] float64, the share of pairs of a token's experts that stand together.

        From recorded pairs where there are any. Otherwise two experts are chosen together in
        proportion to their loads, and less often by (topk_group - 1) / (num_groups - 1) if they
        are of different groups.

        Args:
            load_LE: rows of each expert.
            placement_LP: where experts stand.
            num_parts: ranks, or hosts; of equally many neighbouring slots.
            coactivation_LEE: as in `ExpertTrace`.
        """
        if coactivation_LEE is not None:
            share_LPE = shares_of_parts(placement_LP, load_LE.shape[1], num_parts)
            pairs_LEE = coactivation_LEE * (1.0 - np.eye(load_LE.shape[1]))
            inside_L = np.einsum("lpe,lpe->l", share_LPE @ pairs_LEE, share_LPE)
            pairs_L = np.maximum(pairs_LEE.sum(axis=(1, 2)), 1e-30)
            return np.asarray(inside_L / pairs_L, np.float64)
        layers, groups = len(load_LE), self.num_groups
        share_LE = load_LE / np.maximum(load_LE.sum(axis=1, keepdims=True), 1)
        across = (self.topk_group - 1) / (groups - 1) if groups > 1 else 1.0
        parts_LPG = self._loads_of_parts(share_LE, placement_LP, num_parts)
        groups_LG = share_LE.reshape(layers, groups, -1).sum(axis=2)
        inside_L = across * (parts_LPG.sum(axis=2) ** 2).sum(axis=1)
        inside_L += (1 - across) * (parts_LPG**2).sum(axis=(1, 2))
        every_L = across + (1 - across) * (groups_LG**2).sum(axis=1)
        return np.asarray(inside_L / every_L, np.float64)

    def _loads_of_parts(
        self, load_LE: NDArray[np.float64], placement_LP: NDArray[np.int64], num_parts: int
    ) -> NDArray[np.float64]:
        """Return [L, parts, G], the load of each group's slots on each rank or host."""
        layers, slots = placement_LP.shape
        experts, groups = load_LE.shape[1], self.num_groups
        load_LP = np.take_along_axis(load_LE / copies_of(placement_LP, experts), placement_LP, 1)
        part_LP = np.arange(layers)[:, None] * num_parts + np.arange(slots) // (slots // num_parts)
        flat_LP = part_LP * groups + placement_LP // (experts // groups)
        sums = np.bincount(flat_LP.ravel(), load_LP.ravel(), layers * num_parts * groups)
        return np.asarray(sums.reshape(layers, num_parts, groups), np.float64)


def shares_of_parts(
    placement_LP: NDArray[np.int64], num_experts: int, num_parts: int
) -> NDArray[np.float64]:
    """Return [L, parts, E] float64, which share of an expert's slots stands in each part."""
    layers, slots = placement_LP.shape
    part_P = np.arange(slots) // (slots // num_parts)
    flat = (np.arange(layers)[:, None] * num_parts + part_P) * num_experts + placement_LP
    held = np.bincount(flat.ravel(), minlength=layers * num_parts * num_experts)
    held_LPE = held.reshape(layers, num_parts, num_experts)
    return np.asarray(held_LPE / held_LPE.sum(axis=1, keepdims=True), np.float64)


def visited_parts(together: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """How many parts a token's experts lie in, if so large a share of its pairs stands together."""
    share = np.clip(together, 1e-6, 1.0)
    visited: NDArray[np.float64] = (1 - (1 - share) ** top_k) / share
    return visited
