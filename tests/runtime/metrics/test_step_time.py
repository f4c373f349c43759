"""The time of a step by its size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.metrics.step_time import StepTime

SIZES = st.lists(st.integers(1, 10_000), min_size=2, max_size=100)


@given(SIZES, st.floats(1e-4, 0.1), st.floats(1e-7, 1e-3))
def test_steps_on_a_line_are_predicted(sizes: list[int], fixed: float, per_item: float) -> None:
    steps = StepTime()
    for size in sizes:
        steps.observe(size, fixed + per_item * size)
    if len(set(sizes[-64:])) > 1:
        assert steps.seconds(5000) == pytest.approx(fixed + per_item * 5000, rel=1e-3)
    largest = steps.largest_within(steps.seconds(500), 10_000)
    assert 499 <= largest <= 10_000


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1)), max_size=80))
def test_nothing_is_ever_below_nothing(observed: list[tuple[int, float]]) -> None:
    steps = StepTime()
    for size, seconds in observed:
        steps.observe(size, seconds)
    assert steps.per_item_s >= 0.0
    assert steps.seconds(0) >= -1e-9
    assert 0 <= steps.largest_within(0.5, 64) <= 64


def test_what_is_not_known_forbids_nothing() -> None:
    steps = StepTime()
    assert not steps.is_known
    assert steps.seconds(1000) == 0.0
    assert steps.largest_within(0.0, 64) == 64
    steps.observe(10, 0.1)
    assert steps.per_item_s == pytest.approx(0.01)
