"""What the rules of both roles cost a pair, in time that is only counted: next to nothing.

Bound by decode, by prefill or by both alike, a pair has to do what its slower side does alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.integration.pair_model import BLOCK_SIZE, PairModel, PairShape

WINDOW_S = 4.0
BOUND_BY_DECODE = PairShape()
BOUND_BY_PREFILL = PairShape(output_len=20)
BOUND_BY_BOTH = PairShape(output_len=37, in_flight=96)


def decode_alone(shape: PairShape) -> float:
    """Requests per second where every place of decode is always taken."""
    step_s = shape.decode_step_s + shape.batch * shape.decode_request_s
    return shape.batch * shape.num_ranks / step_s / (shape.output_len - 1)


def prefill_alone(shape: PairShape) -> float:
    """Requests per second where every step is full."""
    count = shape.batch_tokens // shape.prompt_len
    step_s = shape.prefill_step_s + count * shape.prompt_len * shape.prefill_token_s
    return count / step_s


def ratio(shape: PairShape) -> float:
    """The pair's rate over that of its slower side; all blocks come back at the end."""
    model = PairModel(shape)
    rate = model.measure(WINDOW_S)
    model.drain()
    return rate / min(decode_alone(shape), prefill_alone(shape))


def test_the_cases_are_what_they_are_called() -> None:
    assert decode_alone(BOUND_BY_DECODE) < 0.8 * prefill_alone(BOUND_BY_DECODE)
    assert prefill_alone(BOUND_BY_PREFILL) < 0.8 * decode_alone(BOUND_BY_PREFILL)
    assert decode_alone(BOUND_BY_BOTH) == pytest.approx(prefill_alone(BOUND_BY_BOTH), rel=0.05)


@pytest.mark.parametrize("shape", [BOUND_BY_DECODE, BOUND_BY_PREFILL, BOUND_BY_BOTH])
def test_a_pair_does_what_its_slower_side_does(shape: PairShape) -> None:
    assert 0.97 < ratio(shape) < 1.03


def test_blocks_for_a_tenth_more_than_run_are_enough() -> None:
    blocks = BOUND_BY_DECODE.batch * (BOUND_BY_DECODE.prompt_len // BLOCK_SIZE + 1)
    assert 0.97 < ratio(replace(BOUND_BY_DECODE, decode_blocks=blocks * 11 // 10)) < 1.03
    assert ratio(replace(BOUND_BY_DECODE, decode_blocks=blocks)) > 0.9


def test_a_prefill_pool_of_one_step_is_enough_for_decode() -> None:
    blocks = BOUND_BY_DECODE.batch_tokens // BLOCK_SIZE
    assert 0.97 < ratio(replace(BOUND_BY_DECODE, prefill_blocks=blocks)) < 1.03


def test_one_step_that_stands_still_costs_a_third_of_the_window() -> None:
    """As long as a compiler takes; clients then wait as long for prefill, whose steps are fast."""
    shape = replace(BOUND_BY_DECODE, stall_at=1.0, stall_s=2.0)
    model = PairModel(shape)
    rate = model.measure(WINDOW_S)
    assert 0.5 < rate / decode_alone(shape) < 0.75
    assert max(model.queue_s) > 1.9
    model.drain()
