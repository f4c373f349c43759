"""The same steps through a model in all its layouts on several ranks, against the plain one.

Run inside each rank by `rank_main`: layouts differ in where hidden states lie (replicated or
scattered), in how rows reach experts, and in whether a step runs as two micro-batches.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.batch import ForwardBatch, pack_forward_batch
from engine.build import build_kv_pool
from engine.config import ModelConfig
from engine.execution import Execution
from engine.kernels.portable import PortableKernels
from engine.layers.moe import MoE
from engine.layers.norm import Normed
from engine.micro_batches import OverlapRule
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.operations import run
from engine.parallel.groups import ProcessGroups
from engine.parallel.token_sharding import ScatteredTokens
from engine.weights.loader import load_weights

BLOCK_SIZE = 8
STEPS: list[list[tuple[int, int]]] = [
    [(37, 0)],
    [(1, 37)],
    [(1, 38), (2, 0)],
    [(19, 39), (5, 2), (8, 0)],
]
"""Tokens of each sequence in each step, and tokens before: counts that no tp divides, and fewer
tokens than ranks."""


def make_step(lengths: Sequence[int], before: Sequence[int]) -> ForwardBatch:
    """Return a step of sequences that own 12 blocks each; tokens follow from the position."""
    queries, prefix = np.array(lengths), np.array(before)
    tables = 12 * np.arange(len(queries), dtype=np.int32)[:, None] + np.arange(
        1, 13, dtype=np.int32
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
        block_size=BLOCK_SIZE,
    )


@torch.inference_mode()
def run_steps(model: DeepseekV3ForCausalLM) -> list[Tensor]:
    """Return the hidden states of all steps, then the latents of the sequences."""
    pool = build_kv_pool(model, 64, block_size=BLOCK_SIZE)
    pool.data.fill_(float("nan"))
    pool.data[0] = 0.0
    states = [
        model(make_step([n for n, _ in step], [before for _, before in step]), pool)
        for step in STEPS
    ]
    return [*states, pool.data[1:]]


def load(
    checkpoint: Path,
    groups: ProcessGroups,
    *,
    fp8: bool = False,
    execution: Execution | None = None,
) -> DeepseekV3ForCausalLM:
    """Return a model in float32, or with weights in FP8 (and bfloat16 otherwise)."""
    model = DeepseekV3ForCausalLM(
        ModelConfig.from_dir(checkpoint),
        groups,
        dtype=torch.bfloat16 if fp8 else torch.float32,
        kernels=PortableKernels(has_fp8=fp8),
        execution=execution,
    )
    load_weights(model, checkpoint)
    return model.eval()


def compare_layouts(
    checkpoint: Path, groups: ProcessGroups, *, fp8: bool = False
) -> dict[str, float]:
    """Return how far each layout is from one rank alone, as a share of the norm.

    In FP8 under tp, from the plain layout: which shards stay in FP8 depends on tp.
    """
    if fp8 and groups.dims.tp > 1:
        reference = load(checkpoint, groups, fp8=True, execution=Execution(scatter_tokens=False))
    else:
        reference = load(checkpoint, ProcessGroups(), fp8=fp8)
    expected = run_steps(reference)
    overlap = [OverlapRule(min_tokens=2, lag=lag) for lag in (0, 3)]
    layouts = {"plain": Execution(), "overlapped": Execution(overlap=overlap[0])}
    if groups.dims.tp > 1:
        layouts = {
            "replicated": Execution(scatter_tokens=False),
            "replicated, overlapped": Execution(scatter_tokens=False, overlap=overlap[0]),
            "scattered": Execution(scatter_tokens=True),
            "scattered, overlapped": Execution(scatter_tokens=True, overlap=overlap[1]),
        }
    return {
        name: _distance(run_steps(load(checkpoint, groups, fp8=fp8, execution=execution)), expected)
        for name, execution in layouts.items()
    }


@torch.inference_mode()
def compare_experts(checkpoint: Path, groups: ProcessGroups) -> float:
    """Return how far one MoE layer in FP8 is from one rank alone, which rounds alike.

    Under tp the ranks have shares of the same rows, under dp rows of their own, down to none.
    """
    layers = [
        load(checkpoint, axes, fp8=True).model.layers[1].mlp for axes in (groups, ProcessGroups())
    ]
    worst = 0.0
    for attempt, num_tokens in enumerate((37, 1, 0, 200)):
        own = num_tokens if groups.dims.tp > 1 else num_tokens * groups.rank // groups.dims.dp
        generator = torch.Generator().manual_seed(attempt)
        rows = torch.randn(own, 256, generator=generator).bfloat16()
        sharding = ScatteredTokens(groups.tp_group)
        actual = _run_layer(layers[0], sharding.take(rows))
        expected = _run_layer(layers[1], rows).float()
        difference = sharding.start_gather(actual, own).wait().float() - expected
        if own:
            worst = max(worst, float(difference.norm() / expected.norm()))
    return worst


def _run_layer(layer: torch.nn.Module, rows_TD: Tensor) -> Tensor:
    assert isinstance(layer, MoE)
    assert layer.experts.is_fp8
    normed = Normed(plain_TD=rows_TD, fp8_TD=PortableKernels.quantize_rows(rows_TD))
    return run(layer(normed))


def _distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    worst = 0.0
    for left, right in zip(actual, expected, strict=True):
        assert left.shape == right.shape
        assert left.isnan().equal(right.isnan())
        difference = (left - right).nan_to_num().float().norm()
        worst = max(worst, float(difference / right.nan_to_num().float().norm()))
    return worst
