"""How far a tensor is from what it should be, over all its numbers."""

from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`; asserts that it is finite."""
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    # A comparison with NaN is false either way: it must not depend on how a test is written.
    assert error.isfinite(), f"a relative error of {float(error)}"
    return float(error)
