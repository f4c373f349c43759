"""Ranks with slots of experts and tokens of their own, and what dispatching must come to.

An expert is a factor of its own, so that the expected sums are one line.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.experts.placement import ExpertPlacement
from engine.formats.expert_rows import AlignedRows
from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.masked_rows import MaskedRows
from engine.kernels.reference import quantize_rows

HIDDEN, TOP_K = 128, 8
WORST_ERROR = 0.03
"""bfloat16 once per expert, once per rank, and once at the end."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Ranks with slots, and the tokens of each.

    With `padded_to` every rank brings so many rows: behind its tokens such as choose no expert, and
    hold what must spoil nothing.
    """

    num_ranks: int
    slots: tuple[int, ...]
    num_tokens: list[int]
    num_experts: int = 256
    max_tokens: int = 16
    padded_to: int = 0
    placement: ExpertPlacement = field(init=False)

    def __post_init__(self) -> None:
        placement = ExpertPlacement.from_physical(self.slots, self.num_experts)
        object.__setattr__(self, "placement", placement)

    @property
    def share(self) -> int:
        return len(self.slots) // self.num_ranks

    def tokens(self, rank: int, step: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states, physical experts, weights, and the rank's own term."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        count = self.num_tokens[rank]
        hidden = torch.randn(count, HIDDEN, generator=generator).bfloat16()
        scores = torch.rand(count, self.num_experts, generator=generator)
        # Some experts are far more popular than others, and some are never chosen.
        weights, ids = (scores + torch.linspace(0, 0.6, self.num_experts)).topk(TOP_K, dim=-1)
        num_padding = max(self.padded_to - count, 0)
        own = torch.randn(count + num_padding, HIDDEN, generator=generator).bfloat16()
        return (
            torch.cat((hidden, hidden.new_full((num_padding, HIDDEN), torch.nan))),
            self.placement.to_physical(torch.cat((ids, ids.new_full((num_padding, TOP_K), -1)))),
            torch.cat((weights, weights.new_ones(num_padding, TOP_K))),
            own,
        )

    def factor(self, slots: Tensor) -> Tensor:
        """What an expert multiplies by: a property of the logical expert."""
        logical = torch.tensor(self.slots)[slots]
        return 1.0 + (logical * 37 % 256) / 256

    def expected(self, rank: int, step: int = 0) -> Tensor:
        hidden, ids, weights, own = self.tokens(rank, step)
        rows = quantize_rows(hidden).dequantize().nan_to_num(0.0)
        return rows * (self.factor(ids) * weights).sum(1, keepdim=True) + own.float()


def run_experts(rows: AlignedRows | MaskedRows, world: World, rank: int) -> Tensor:
    """Multiply each row by its expert's factor; rows not in use come out as NaN."""
    factors = world.factor(torch.arange(rank * world.share, (rank + 1) * world.share))
    if isinstance(rows, AlignedRows):
        out = rows.rows.dequantize() * factors[rows.expert_M.clamp_min(0)].unsqueeze(1)
        return out.bfloat16()
    num_local, num_rows, _ = rows.data_LMD.shape
    out = torch.full((num_local, num_rows, HIDDEN), torch.nan, dtype=torch.bfloat16)
    assert rows.num_rows_L.dtype == torch.int32
    assert rows.scale_LMG.stride(1) == 1
    assert 1 <= rows.expected_rows <= num_rows
    for expert, count in enumerate(rows.num_rows_L.tolist()):
        part = Fp8Rows(
            data_TK=rows.data_LMD[expert, :count], scale_TG=rows.scale_LMG[expert, :count]
        )
        out[expert, :count] = (part.dequantize() * factors[expert]).bfloat16()
    return out


def spread_slots(num_slots: int, num_experts: int = 256) -> tuple[int, ...]:
    """Every expert once, the first ones twice, in an order that mixes them."""
    slots = [expert % num_experts for expert in range(num_slots)]
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(7)).tolist()
    return tuple(slots[i] for i in order)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to 1 + |expected|; NaN counts as infinite."""
    if not expected.numel():
        return 0.0
    worst = ((actual.float() - expected).abs() / (1 + expected.abs())).max()
    return float(worst) if bool(worst.isfinite()) else float("inf")
