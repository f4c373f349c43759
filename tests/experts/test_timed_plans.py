"""A running instance plans by time: its own sizes, its device, how long its steps really take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import DeepseekV3Config
from engine.experts.pass_clock import PassClock
from experts.gpu_rates import CPU, H200
from experts.plan import Terms
from experts.timed_plans import ServedExperts, TimedPlans
from experts.windows import LoadWindow
from tests.engine.tiny import tiny_config
from tests.experts.expert_load import even, skewed_trace

PASSES = 100


def served(**changes: object) -> ServedExperts:
    """Four layers of 32 experts of DeepSeek-V3's size on 8 ranks."""
    config = DeepseekV3Config.from_hf(
        tiny_config(
            hidden_size=7168,
            moe_intermediate_size=2048,
            n_routed_experts=32,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
        )
    )
    values: dict[str, object] = {
        "config": config,
        "expert_bytes": 44_050_944,
        "num_ranks": 8,
        "num_hosts": 1,
        "role": "decode",
        "rates": H200,
    }
    return ServedExperts(**(values | changes))  # type: ignore[arg-type]


def window(seed: int = 0, *, tokens: int) -> LoadWindow:
    """Skewed passes of so many tokens."""
    counts = skewed_trace(seed, tokens=tokens * PASSES, num_rows=1).counts_NLE[0]
    return LoadWindow(first_pass=0, end_pass=PASSES, counts_LE=counts)


TABLE = even(skewed_trace(), 32, 8)


def plans(pass_s: float | None, *, of: ServedExperts | None = None) -> TimedPlans:
    return TimedPlans(of or served(), Terms(min_gain=0.02), lambda: pass_s)


def test_rows_that_cost_time_are_evened_out_and_it_is_said_what_that_brings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    maker = plans(None)
    with caplog.at_level("INFO"):
        rounds = maker(window(tokens=16_384), TABLE)
    expected = maker.counts.expected
    assert expected is not None
    assert expected.gain > 0.1
    assert (expected.num_rounds, expected.num_moves) == (len(rounds), sum(map(len, rounds)))
    assert expected.num_bytes == expected.num_moves * 44_050_944 > 0
    assert maker.counts.num_refused == 0
    (said,) = [record.message for record in caplog.records]
    for part in ("pays by its model", f"num_bytes={expected.num_bytes}", "rates='NVIDIA H200'"):
        assert part in said


def test_rows_that_cost_nothing_are_left_and_it_is_said_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """128 tokens a pass: ranks wait for weights, and even rows bring a little of their way."""
    maker = plans(0.002)
    with caplog.at_level("INFO"):
        assert not maker(window(tokens=128), TABLE)
    assert maker.counts.num_refused == 1
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("experts stay: ")


def test_a_step_that_is_mostly_something_else_gains_little() -> None:
    load = window(tokens=16_384)
    gains = []
    for pass_s in (None, 0.05, 1.0):
        maker = plans(pass_s)
        maker(load, TABLE)
        assert maker.counts.expected is not None
        gains.append(maker.counts.expected.gain)
    assert gains[0] > gains[1] > gains[2] > 0
    assert maker.counts.num_refused == 1


def test_a_step_that_is_shorter_than_the_model_says_is_believed() -> None:
    """Fast passes of a slow model: the same gain, and moves are worth less of their time."""
    maker, hasty = plans(None), plans(1e-9)
    load = window(tokens=16_384)
    assert maker(load, TABLE)
    assert not hasty(load, TABLE)
    assert hasty.counts.num_refused == 1


def test_what_is_served_decides() -> None:
    load = window(tokens=4096)
    on_gpu, on_cpu = plans(None), plans(None, of=served(rates=CPU))
    across = plans(None, of=served(num_hosts=2))
    for maker in (on_gpu, on_cpu, across):
        maker(load, TABLE)
    gains = [maker.counts.expected.gain for maker in (on_gpu, on_cpu, across)]  # type: ignore[union-attr]
    assert len(set(gains)) == 3
    trace = served(num_hosts=2).trace_of(load)
    assert (trace.num_hosts, trace.passes_per_row, trace.num_rows) == (2, PASSES, 1)
    assert trace.tokens_per_pass == pytest.approx(4096, rel=0.01)


def test_a_window_without_tokens_is_no_plan() -> None:
    maker = plans(None)
    empty = replace(window(tokens=128), counts_LE=np.zeros((3, 32), np.int64))
    assert maker(empty, TABLE) == ()
    assert maker.counts.expected is None


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    tokens=st.sampled_from([1, 64, 1024, 16_384]),
    pass_s=st.one_of(st.none(), st.floats(1e-5, 1.0)),
)
def test_equal_windows_are_equal_plans_that_pay_or_move_nothing(
    seed: int, tokens: int, pass_s: float | None
) -> None:
    load = window(seed, tokens=tokens)
    one, other = plans(pass_s), plans(pass_s)
    rounds = one(load, TABLE)
    assert other(load, TABLE) == rounds
    expected = one.counts.expected
    assert expected is not None
    assert bool(rounds) != bool(one.counts.num_refused)
    assert not rounds or expected.gain >= 0.02


def test_a_pass_is_as_long_as_most_are() -> None:
    times = iter(range(1000))
    late = 0.0

    def clock() -> float:
        return next(times) * 0.01 + late

    passes = PassClock(clock)
    for _ in range(16):
        passes.passed()
        assert passes.pass_s() is None
    late = 100.0
    passes.passed()
    assert passes.pass_s() == pytest.approx(0.01)
