"""Traces with a skew, for tests of plans."""

from typing import Any

import numpy as np

from experts.balancedness import even_placement
from experts.trace import ExpertTrace


def skewed_trace(
    seed: int = 0,
    *,
    num_layers: int = 3,
    num_experts: int = 32,
    tokens: int = 4096,
    num_rows: int = 4,
    skew: float = 0.7,
    **changes: Any,
) -> ExpertTrace:
    """Rows of the same distribution; each layer's experts are likely by a gamma distribution.

    The smaller `skew`, the more uneven. Sizes are DeepSeek-V3's.
    """
    generator = np.random.default_rng(seed)
    likely_LE = generator.gamma(skew, 1.0, (num_layers, num_experts)) + 1e-9
    likely_LE /= likely_LE.sum(axis=1, keepdims=True)
    rows = [[generator.multinomial(tokens * 2, p_E) for p_E in likely_LE] for _ in range(num_rows)]
    values: dict[str, Any] = {
        "counts_NLE": np.array(rows, np.int64),
        "tokens_N": np.full(num_rows, tokens),
        "role": "prefill",
        "model_name": "small",
        "top_k": 2,
        "num_ranks": 8,
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "expert_bytes": 44_050_944,
    }
    return ExpertTrace(**(values | changes))


def even(trace: ExpertTrace, num_slots: int, num_ranks: int) -> np.ndarray:
    """[L, P] int64: every layer evenly."""
    return np.tile(even_placement(trace.num_experts, num_slots, num_ranks), (trace.num_layers, 1))
