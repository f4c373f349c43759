"""Time is weights or rows and travel: what decides on what does not."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.balancedness import even_placement
from experts.data_sheets import H200_REACHED
from experts.gpu_rates import H200, rates_of_device
from experts.time_model import TimeModel, visited_parts
from tests.experts.expert_load import even, skewed_trace

EXPERT_BYTES = 44_050_944


def deepseek_v3(**changes: Any) -> TimeModel:
    values: dict[str, Any] = {
        "s_per_active": EXPERT_BYTES / H200.memory,
        "s_per_row": 6 * 7168 * 2048 / H200.flops,
        "s_per_link_row": 0.0,
        "s_per_network_row": 0.0,
        "s_per_link_move": EXPERT_BYTES / H200.link,
        "s_per_network_move": EXPERT_BYTES / H200.network,
        "top_k": 8,
        "num_groups": 8,
        "topk_group": 4,
    }
    return TimeModel(**(values | changes))


def test_rates_are_those_that_bounds_are_measured_by() -> None:
    reached = H200_REACHED
    assert (H200.flops, H200.memory, H200.link) == (reached.fp8, reached.memory, reached.link)
    assert H200.wide_flops == reached.attention
    assert rates_of_device("NVIDIA H200") == H200


def test_another_gpu_reaches_the_same_share_of_its_data_sheet() -> None:
    rates = rates_of_device("NVIDIA H100 80GB HBM3")
    assert rates is not None
    assert (rates.flops, rates.wide_flops, rates.link) == pytest.approx(
        (H200.flops, H200.wide_flops, H200.link)
    )
    assert rates.memory == pytest.approx(H200.memory * 3350 / 4800)
    assert rates_of_device("an unknown GPU") is None
    cpu = rates_of_device("CPU")
    assert cpu is not None
    assert cpu.flops < 1e12


def test_experts_in_wide_numbers_compute_slower_and_send_longer_rows() -> None:
    narrow, wide = (
        TimeModel.of_trace(skewed_trace(expert_bytes=numbers * 3 * 7168 * 2048))
        for numbers in (1, 2)
    )
    assert wide.s_per_active == 2 * narrow.s_per_active
    assert wide.s_per_row == pytest.approx(narrow.s_per_row * H200.flops / H200.wide_flops)
    assert wide.s_per_link_row == pytest.approx(4 * 7168 / H200.link)


@given(pass_s=st.floats(1e-6, 10.0))
def test_a_fitted_model_makes_passes_as_long_as_measured(pass_s: float) -> None:
    trace = skewed_trace()
    model = TimeModel.of_trace(trace)
    now = even(trace, 32, 8)
    own_s = float(model.layer_seconds(trace.counts_NLE, now, num_ranks=8).sum())
    fitted = model.fitted(own_s, pass_s)
    then_s = float(fitted.layer_seconds(trace.counts_NLE, now, num_ranks=8).sum())
    assert then_s + fitted.other_s_per_pass == pytest.approx(pass_s)
    assert then_s <= own_s * (1 + 1e-9)
    assert fitted.s_per_link_move == model.s_per_link_move


def test_an_active_expert_is_ten_microseconds_and_the_ridge_161_rows() -> None:
    model = deepseek_v3()
    assert model.s_per_active == pytest.approx(10.2e-6, rel=0.01)
    assert model.s_per_active / model.s_per_row == pytest.approx(161, abs=1)


def test_below_the_ridge_rows_cost_nothing_and_copies_do() -> None:
    """Decode on 8 ranks: skew is free, and four more experts of 32 are 41 us a layer."""
    model = deepseek_v3()
    in_order = even_placement(256, 256, 8)[None]
    flat = np.full((1, 1, 256), 16)
    skewed = flat.copy()
    skewed[..., 0] = 400
    even, uneven = (
        float(model.layer_seconds(counts, in_order, num_ranks=8)[0]) for counts in (flat, skewed)
    )
    assert even == uneven == pytest.approx(32 * model.s_per_active)
    redundant = even_placement(256, 288, 8)[None]
    more = float(model.layer_seconds(flat, redundant, num_ranks=8)[0])
    assert more - even == pytest.approx(41e-6, rel=0.01)


def test_above_the_ridge_the_fullest_ranks_rows_are_the_time() -> None:
    model = deepseek_v3()
    counts = np.full((1, 1, 256), 512)
    counts[..., :32] = 1024
    seconds = model.layer_seconds(counts, even_placement(256, 256, 8)[None], num_ranks=8)
    assert seconds[0] == pytest.approx(32 * 1024 * model.s_per_row)


def test_fewer_rows_than_copies_reach_so_many_copies() -> None:
    model = deepseek_v3(num_groups=1, topk_group=1)
    counts, placement = np.array([[[1, 4]]]), np.array([[0, 1, 0, 1]])
    seconds = model.layer_seconds(counts, placement, num_ranks=2)
    assert seconds[0] == pytest.approx(1.5 * model.s_per_active)


def test_rows_of_several_passes_reach_experts_as_by_poisson() -> None:
    model = deepseek_v3(num_groups=1, topk_group=1)
    counts, placement = np.full((1, 1, 2), 100), np.array([[0, 1]])
    seconds = model.layer_seconds(counts, placement, num_ranks=2, passes_per_row=100)
    assert seconds[0] == pytest.approx((1 - np.exp(-1)) * model.s_per_active)


def test_groups_in_order_are_fewer_ranks_for_a_token() -> None:
    """3.6 of 8 ranks for eight experts in four of eight groups; torn apart 5.25."""
    model, load = deepseek_v3(), np.ones((1, 256))
    in_order = even_placement(256, 256, 8)[None]
    torn = np.arange(256).reshape(32, 8).T.reshape(1, 256)
    visited = [
        float(visited_parts(model.together(load, placed, 8), 8)[0]) for placed in (in_order, torn)
    ]
    assert visited[0] == pytest.approx(3.6, abs=0.01)
    assert visited[1] == pytest.approx(5.25, abs=0.01)
    slower = deepseek_v3(s_per_link_row=56e-9)
    counts = np.full((1, 1, 256), 512)
    times = [
        float(slower.layer_seconds(counts, placed, num_ranks=8)[0]) for placed in (in_order, torn)
    ]
    assert times[1] > times[0] * 1.05


def test_recorded_pairs_say_who_stands_together() -> None:
    model = deepseek_v3(top_k=2, num_groups=1, topk_group=1)
    pairs = np.zeros((1, 4, 4), np.int64)
    pairs[0, 0, 1] = pairs[0, 1, 0] = 30
    pairs[0, 2, 3] = pairs[0, 3, 2] = 10
    load = np.array([[30, 30, 10, 10]])
    for placement, share in (([0, 1, 2, 3], 1.0), ([0, 2, 1, 3], 0.0), ([0, 1, 0, 2], 0.5)):
        if 3 in placement:
            assert model.together(load, np.array([placement]), 2, pairs)[0] == share
