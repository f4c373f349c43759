"""Rows of ranks over their layer's mean, where experts stand, and not where they were in order."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.summary import rank_load
from experts.trace import ExpertTrace

EXPERTS, LAYERS = 8, 3


def trace_of(counts_NLE: np.ndarray, num_ranks: int) -> ExpertTrace:
    return ExpertTrace(
        counts_NLE=counts_NLE,
        tokens_N=counts_NLE.sum(axis=2).max(axis=1),
        role="decode",
        model_name="tiny",
        top_k=1,
        num_ranks=num_ranks,
        hidden_size=64,
        moe_intermediate_size=32,
        expert_bytes=1,
    )


def test_rows_go_where_experts_stand() -> None:
    counts = np.array([[[4, 0, 0, 0], [1, 1, 1, 1]], [[0, 0, 2, 0], [1, 1, 1, 1]]])
    placement = np.array([[2, 3, 0, 1], [0, 1, 2, 3]])
    load = rank_load(trace_of(counts, 2), placement)
    assert load.times_mean_LR.tolist() == [[2 / 3, 4 / 3], [1.0, 1.0]]
    # Each pass waits for its own fullest rank: of layer 0 for 4 rows and for 2, twice the mean.
    assert load.now.overall == pytest.approx((2 + 1 + 2 + 2) / (4 + 2 + 2 + 2))
    told = json.loads(json.dumps(load.describe()))
    assert told["times_mean"] == [[0.6667, 1.3333], [1.0, 1.0]]
    assert told["now"]["worst_layer_index"] == 0


def test_copies_share_their_experts_rows() -> None:
    load = rank_load(trace_of(np.array([[[6, 2, 0]]]), 2), np.array([[0, 1, 0, 2]]))
    assert load.times_mean_LR.tolist() == [[5 / 4, 3 / 4]]


def test_a_layer_without_a_row_is_even() -> None:
    counts = np.array([[[2, 0], [0, 0]]])
    load = rank_load(trace_of(counts, 2), np.array([[0, 1], [0, 1]]))
    assert load.times_mean_LR.tolist() == [[2.0, 0.0], [1.0, 1.0]]


@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 3),
    num_ranks=st.sampled_from([1, 2, 3, 4]),
)
def test_ranks_of_a_layer_have_one_in_the_mean(seed: int, num_rows: int, num_ranks: int) -> None:
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, 50, (num_rows, LAYERS, EXPERTS))
    slots = np.arange(12) % EXPERTS  # four experts twice
    placement = np.stack([draw.permutation(slots) for _ in range(LAYERS)])
    load = rank_load(trace_of(counts, num_ranks), placement)
    assert load.times_mean_LR.shape == (LAYERS, num_ranks)
    assert load.times_mean_LR.mean(axis=1) == pytest.approx(1.0)
