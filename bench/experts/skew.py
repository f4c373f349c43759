"""Synthetic skew: traces like a published one, from a seed. Nothing here was recorded.

TensorRT-LLM's technical blog 4 tells of DeepSeek-R1 on a translation set, 32 ranks with a mean of
1,024 rows, 58 MoE layers: imbalance max / mean - 1 of 1.564, which is 0.39 of balancedness, 10.9 of
single experts, and hot experts that stay over steps. Here experts of a layer are likely by a
log-normal distribution whose width gives those figures about, the same in every pass of a window;
between windows they drift a little. Groups are not modelled: choices of a pass are multinomial.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from experts.trace import ExpertTrace

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIGMA: Final = 1.06
"""Of the logarithm of an expert's likelihood: balancedness 0.39 on 32 ranks with 4,096 tokens."""
DRIFT: Final = 0.05
"""Of the same between two windows."""


def log_likelihoods(
    num_layers: int, num_experts: int, *, seed: int, sigma: float = SIGMA
) -> NDArray[np.float64]:
    """Return [L, E] float64: of every expert of a layer, up to a constant."""
    drawn: NDArray[np.float64] = np.random.default_rng(seed).normal(
        0.0, sigma, (num_layers, num_experts)
    )
    return drawn


def skewed_windows(
    *,
    role: str,
    tokens: int,
    num_layers: int = 58,
    num_experts: int = 256,
    num_rows: int = 16,
    sigma: float = SIGMA,
    drift: float = DRIFT,
    seed: int = 0,
) -> ExpertTrace:
    """Two windows of `num_rows` passes each, of `tokens` tokens over all ranks.

    Sizes are DeepSeek-V3's.
    """
    generator, top_k = np.random.default_rng(seed), 8
    log_LE = generator.normal(0.0, sigma, (num_layers, num_experts))
    windows = []
    for _ in range(2):
        likely_LE = np.exp(log_LE)
        # No expert is in more choices than there are tokens.
        likely_LE = np.minimum(likely_LE / likely_LE.sum(axis=1, keepdims=True), 0.9 / top_k)
        likely_LE /= likely_LE.sum(axis=1, keepdims=True)
        rows = [
            [generator.multinomial(tokens * top_k, p_E) for p_E in likely_LE]
            for _ in range(num_rows)
        ]
        windows.append(np.array(rows, np.int64))
        log_LE = log_LE + generator.normal(0.0, drift, log_LE.shape)
    return ExpertTrace(
        counts_NLE=np.concatenate(windows),
        tokens_N=np.full(2 * num_rows, tokens),
        role=role,
        model_name="synthetic skew",
        top_k=top_k,
        num_groups=8,
        topk_group=4,
        num_ranks=32,
        num_hosts=4,
        hidden_size=7168,
        moe_intermediate_size=2048,
        expert_bytes=44_050_944,
    )
