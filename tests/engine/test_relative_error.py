"""The measure that kernels are compared by."""

import pytest
import torch

from tests.engine.relative_error import relative_error


def test_it_is_the_norm_of_the_difference_over_the_norm() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(expected, expected) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert relative_error(torch.tensor([4, 4]).bfloat16(), expected.double()) == pytest.approx(0.2)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_no_error_but_a_failure(wrong: float) -> None:
    with pytest.raises(AssertionError, match="relative error"):
        relative_error(torch.tensor([1.0, wrong]), torch.ones(2))
