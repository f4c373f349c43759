"""A rank that draws tokens, stands for experts, compares with the plain sum, and takes times.

What the measurements of `bench.kernels.deep_ep` have in common.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.kernels.device_time import median_seconds
from bench.kernels.fp8 import quantize
from engine.formats.expert_rows import AlignedRows
from engine.formats.fp8_rows import Activation
from engine.kernels.base import Kernels
from engine.kernels.create import create_kernels
from engine.kernels.masked_rows import MaskedRows
from engine.kernels.reference import quantize_rows
from engine.parallel.groups import RankGroup

TOP_K = 8
NUM_GROUPS = 8
"""Of experts."""

WORST_ERROR = 0.05
"""Of a result, relative: e4m3 on the way out, bfloat16 per expert, per rank and at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a rank brings: [T, D] bfloat16, [T, K] int64 experts, [T, K] float32 weights."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Bench:
    """One rank's measurements."""

    def __init__(self, group: RankGroup, options: argparse.Namespace) -> None:
        self.group = group
        self.kernels: Kernels = create_kernels("cuda")
        self.num_experts: int = options.experts
        self.hidden_size: int = options.hidden
        self.topk_groups: int = options.topk_groups
        self.share = self.num_experts // group.size
        self._seed = 0

    def draw(self, num_tokens: int) -> Tokens:
        """Return fresh tokens; every call differs."""
        self._seed += 1
        generator = torch.Generator("cuda").manual_seed(10_000 * self._seed + self.group.rank)
        shape = (num_tokens, self.hidden_size)
        hidden = torch.randn(shape, device="cuda", generator=generator).bfloat16()
        scores = torch.rand(num_tokens, self.num_experts, device="cuda", generator=generator)
        order = torch.rand(num_tokens, NUM_GROUPS, device="cuda", generator=generator).argsort(-1)
        is_chosen = (order < self.topk_groups).repeat_interleave(
            self.num_experts // NUM_GROUPS, dim=-1
        )
        weights, ids = (scores * is_chosen).topk(TOP_K, dim=-1)
        return Tokens(hidden=hidden, ids=ids, weights=weights)

    def draw_padded(self, num_tokens: int, num_rows: int) -> Tokens:
        """Return fresh tokens of which those from `num_rows` on are padding, and hold NaN."""
        tokens = self.draw(num_tokens)
        tokens.ids[num_rows:] = -1
        tokens.hidden[num_rows:] = torch.nan
        return tokens

    def feed(self, dispatcher: Any, hidden: torch.Tensor) -> Activation:
        """Return rows as a dispatcher takes them."""
        return quantize(self.kernels, hidden) if dispatcher.takes_quantized else hidden

    def factor(self, experts: torch.Tensor) -> torch.Tensor:
        """Return what stands for an expert's product: a factor of its own."""
        return 1.0 + (experts * 37 % 256) / 256.0

    def run_experts(self, rows: AlignedRows | MaskedRows) -> torch.Tensor:
        """Multiply every row in use by its expert's factor."""
        first = self.group.rank * self.share
        factors = self.factor(torch.arange(first, first + self.share, device="cuda"))
        if isinstance(rows, AlignedRows):
            scaled = rows.rows.dequantize() * factors[rows.expert_M.clamp_min(0).long()][:, None]
            return scaled.bfloat16()
        out = torch.empty(rows.data_LMD.shape, dtype=torch.bfloat16, device="cuda")
        for expert in range(self.share):
            groups = rows.data_LMD[expert].float().view(-1, self.hidden_size // 128, 128)
            scaled = groups * rows.scale_LMG[expert].unsqueeze(-1) * factors[expert]
            out[expert] = scaled.flatten(1)
        return out

    def error(self, out: torch.Tensor, tokens: Tokens) -> float:
        """Return the difference from the plain sum over experts, relative, by norms.

        A kernel may round a number to e4m3 the other way than the reference, an eighth of it away,
        so the largest difference of one number says nothing.
        """
        rows = quantize_rows(tokens.hidden.nan_to_num(0.0)).dequantize()
        shares = self.factor(tokens.ids) * tokens.weights * (tokens.ids >= 0)
        expected = rows * shares.sum(1, keepdim=True)
        if not bool(expected.any()):  # nobody chose an expert
            return float("inf") if bool((out != 0).any()) else 0.0
        worst = (out.float() - expected).norm() / expected.norm()
        # A comparison with NaN is false: it must not look like a small error.
        return float(worst) if bool(torch.isfinite(worst)) else float("inf")

    def slowest(self, call: Callable[[], object], repeats: int = 20, warm_up: int = 5) -> float:
        """Return the median seconds of a call on the device, of the slowest rank."""

        def begin_together() -> None:
            self.group.barrier()
            torch.cuda.synchronize()
            # Some work first, so that the host runs ahead, and ranks begin together.
            torch.cuda._sleep(200_000)  # type: ignore[no-untyped-call]

        seconds = median_seconds(call, repeats, warm_up=warm_up, before=begin_together)
        mine = torch.tensor([seconds], dtype=torch.float64, device="cuda")
        return float(self.group.all_gather(mine).max())

    def check(self, name: str, dispatcher: Any, num_tokens: int, steps: int = 3) -> dict[str, Any]:
        """Compare with the reference: full, uneven and empty batches, fresh every time."""
        worst = 0.0
        for step in range(steps):
            count = (num_tokens, num_tokens // (self.group.rank + 1), 0)[step % 3]
            if step % 3 == 2 and self.group.rank == 0:
                count = 1
            tokens = self.draw(count)
            hidden = self.feed(dispatcher, tokens.hidden)
            pending = dispatcher.start_dispatch(hidden, tokens.ids, tokens.weights)
            rows, handle = pending.wait()
            out = dispatcher.start_combine(self.run_experts(rows), handle, None).wait()
            worst = max(worst, self.error(out, tokens))
        return self.verdict(f"{name}, {num_tokens} tokens, checked", worst)

    def verdict(self, what: str, worst: float) -> dict[str, Any]:
        """Return a check's result; all ranks get that of the worst."""
        mine = torch.tensor([worst], dtype=torch.float64, device="cuda")
        worst = float(self.group.all_gather(mine).max())
        return {"what": what, "worst_error": worst, "ok": worst < WORST_ERROR}


def capture(call: Callable[[], object], times: int) -> torch.cuda.CUDAGraph:
    """Return a graph of `times` calls, warmed up."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    return graph
