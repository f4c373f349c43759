"""The same steps through a model in all its layouts on several ranks, against the plain one.

Run inside each rank by `rank_main`: layouts differ in where hidden states lie (replicated or
scattered), in how rows reach experts, and in whether a step runs as two micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from engine.asking_rows import LastRows
from engine.batch import ForwardBatch, pack_forward_batch
from engine.boot.build import build_kv_pool
from engine.config import DeepseekV3Config
from engine.execution import Execution
from engine.kernels.create import create_kernels
from engine.kernels.portable import portable_kernels
from engine.layers.moe import MoE
from engine.layers.norm import Normed
from engine.memory.kv_pool import KVPool
from engine.micro_batches import OverlapRule
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.operations import run
from engine.parallel.groups import ProcessGroups
from engine.parallel.token_sharding import ScatteredTokens
from engine.weights.loader import load_weights
from tests.engine.formats.fp8 import quantize

STEPS = (((37, 0),), ((1, 37),), ((1, 38), (2, 0)), ((19, 39), (5, 2), (8, 0)))
"""Tokens of each sequence in each step, and tokens before: counts that no tp divides, and fewer
tokens than ranks."""

LARGE_STEPS = (((701, 0),), ((1, 701),), ((1, 702), (2, 0)), ((190, 703), (333, 2), (80, 0)))
"""The same for a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One checkpoint on the axes of `groups`.

    Attributes:
        checkpoint: of the model.
        groups: of this rank.
        fp8: keep weights in FP8, and all else in bfloat16; otherwise everything is float32.
        device: a GPU takes its own kernels.
    """

    checkpoint: Path
    groups: ProcessGroups
    fp8: bool = False
    device: str = "cpu"

    def load(
        self, groups: ProcessGroups | None = None, execution: Execution | None = None
    ) -> DeepseekV3ForCausalLM:
        """Return the model on other axes, or on these."""
        dtype = torch.bfloat16 if self.fp8 else torch.float32
        is_gpu = self.device != "cpu"
        config = DeepseekV3Config.from_dir(self.checkpoint)
        model = DeepseekV3ForCausalLM(
            config,
            groups or self.groups,
            dtype=dtype,
            device=self.device,
            with_mtp=config.num_nextn_predict_layers > 0,
            kernels=create_kernels(self.device, dtype)
            if is_gpu
            else portable_kernels(has_fp8=self.fp8),
            execution=execution,
        )
        load_weights(model, self.checkpoint)
        return model.eval()

    @torch.inference_mode()
    def run_steps(self, model: DeepseekV3ForCausalLM) -> list[Tensor]:
        """Return the hidden states of all steps, an MTP layer's, and all latents."""
        block_size, steps = (8, STEPS) if self.device == "cpu" else (64, LARGE_STEPS)
        pool = build_kv_pool(model, 64, block_size=block_size)
        pool.data.fill_(float("nan"))
        pool.data[0] = 0.0
        states = []
        for step in steps:
            batch = make_step(
                [n for n, _ in step],
                [before for _, before in step],
                block_size=block_size,
                device=self.device,
            )
            states.append(model(batch, pool))
        if model.with_mtp:
            states.append(model.forward_mtp(states[-1], batch.input_ids.flip(0), batch, pool))
            states.append(self._ask_last_rows(model, pool))
        return [*states, pool.data[1:]]

    def _ask_last_rows(self, model: DeepseekV3ForCausalLM, pool: KVPool) -> Tensor:
        """Return what the MTP layer says of one row each of three sequences of two rows."""
        batch = make_step([2] * 3, [5, 0, 3], block_size=pool.block_size, device=self.device)
        place_S = torch.tensor([1, 0, 1], device=self.device)
        num_seqs = torch.tensor([3], device=self.device)
        last = LastRows(place_S=place_S, num_rows=2, num_seqs=num_seqs)
        return model.forward_mtp(model(batch, pool), batch.input_ids.flip(0), batch, pool, last)

    def compare_layouts(self) -> dict[str, float]:
        """Return how far each layout is from one rank alone, as a share of the norm.

        In FP8 under tp, from the plain layout: which shards stay in FP8 depends on tp.
        """
        plain = Execution(scatter_tokens=False)
        is_like_alone = not self.fp8 or self.groups.dims.tp == 1
        axes = ProcessGroups() if is_like_alone else self.groups
        expected = self.run_steps(self.load(axes, plain))
        overlap = [OverlapRule(min_tokens=2, lag=lag) for lag in (0, 3)]
        layouts = {"plain": Execution(), "overlapped": Execution(overlap=overlap[0])}
        if self.groups.dims.tp > 1:
            layouts = {} if self.fp8 else {"replicated": plain}
            layouts |= {
                "replicated, overlapped": Execution(scatter_tokens=False, overlap=overlap[0]),
                "scattered": Execution(scatter_tokens=True),
                "scattered, overlapped": Execution(scatter_tokens=True, overlap=overlap[1]),
            }
        return {
            name: _distance(self.run_steps(self.load(execution=execution)), expected)
            for name, execution in layouts.items()
        }

    @torch.inference_mode()
    def compare_experts(self) -> float:
        """Return how far one MoE layer is from one rank alone, which rounds alike.

        Under tp the ranks have shares of the same rows, under dp rows of their own, down to none.
        """
        dims, sharding = self.groups.dims, ScatteredTokens(self.groups.tp_group)
        model, alone = self.load(), self.load(ProcessGroups())
        worst = 0.0
        for attempt, num_tokens in enumerate((37, 1, 0, 200)):
            own = num_tokens if dims.tp > 1 else num_tokens * self.groups.rank // dims.dp
            generator = torch.Generator().manual_seed(attempt)
            drawn = torch.randn(own, model.config.hidden_size, generator=generator)
            rows = drawn.bfloat16().to(self.device)
            actual = _run_experts(model, sharding.take(rows))
            expected = _run_experts(alone, rows).float()
            difference = sharding.start_gather(actual, own).wait().float() - expected
            if own:
                worst = max(worst, float(difference.norm() / expected.norm()))
        return worst


def make_step(
    lengths: Sequence[int], before: Sequence[int], *, block_size: int = 8, device: str = "cpu"
) -> ForwardBatch:
    """Return a step of sequences that own 15 blocks each; tokens follow from the position."""
    queries, prefix = np.array(lengths), np.array(before)
    tables = 15 * np.arange(len(queries), dtype=np.int32)[:, None] + np.arange(
        1, 16, dtype=np.int32
    )
    ids = [
        (3 * p * p + 7 * p + 11 * s) % 128
        for s, (start, count) in enumerate(zip(before, lengths, strict=True))
        for p in range(start, start + count)
    ]
    return pack_forward_batch(
        np.array(ids, dtype=np.int64),
        queries,
        queries + prefix,
        tables,
        logits_indices=queries.cumsum() - 1,
        block_size=block_size,
        device=device,
    )


def _run_experts(model: DeepseekV3ForCausalLM, rows_TD: Tensor) -> Tensor:
    layer: nn.Module = model.model.layers[1].mlp
    assert isinstance(layer, MoE)
    assert layer.experts.takes_quantized
    normed = Normed(plain_TD=rows_TD, fp8_TD=quantize(model.kernels, rows_TD))
    return run(layer(normed))


def _distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    worst = 0.0
    for left, right in zip(actual, expected, strict=True):
        assert left.shape == right.shape
        assert left.isnan().equal(right.isnan())
        difference = (left - right).nan_to_num().float().norm()
        worst = max(worst, float(difference / right.nan_to_num().float().norm()))
    return worst
