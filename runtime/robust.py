"""Statistics that a few ranks or blocks far out of the ordinary do not move. Pure."""

from __future__ import annotations

import numpy as np

from runtime.rank_waits import Floats

_NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""
_FAR = 4.0
"""Robust deviations, that nothing counts more than."""


def noise_of_median(figures: Floats) -> float:
    """Return how much the median over blocks [B, ...] varies, by the deviations of all of them.

    The root of their mean square, which few blocks tell better than a MAD does; what is far out of
    the ordinary counts as `_FAR` of those, so that a pause does not hide what is slow. The share
    for few blocks: deviations are from their own median.
    """
    num_blocks = len(figures)
    if num_blocks < 2:
        return 0.0
    apart = np.abs(figures - np.median(figures, axis=0))
    varying = apart.reshape(num_blocks, -1)[:, apart.reshape(num_blocks, -1).any(axis=0)]
    if not varying.size:
        return 0.0
    # Of the deviations from a median one is 0 by itself, where the number of blocks is odd.
    others = np.sort(varying, axis=0)[num_blocks % 2 :]
    robust = _NORMAL_MAD * float(np.median(others))
    square = float(np.mean(np.minimum(varying, _FAR * robust) ** 2)) * num_blocks / (num_blocks - 1)
    return float(max(robust, square**0.5) * (1.0 + 0.8 / num_blocks) / num_blocks**0.5)


def lower_median(values: Floats) -> float:
    """Return the middle value, of two the lower: half of all may be high, and do not move it."""
    return float(np.sort(values, axis=None)[(values.size - 1) // 2]) if values.size else 0.0


def lower_median_of(values: Floats, axis: int) -> Floats:
    """Return the lower median along an axis; NaN values do not count."""
    counts = (~np.isnan(values)).sum(axis=axis, keepdims=True)
    places = np.maximum(counts - 1, 0) // 2
    return np.take_along_axis(np.sort(values, axis=axis), places, axis=axis).squeeze(axis)


def mad_of(values: Floats, axis: int) -> Floats:
    """Return the median absolute deviation along an axis; NaN values do not count."""
    middle = np.expand_dims(np.nanmedian(values, axis=axis), axis)
    return np.asarray(_NORMAL_MAD * np.nanmedian(np.abs(values - middle), axis=axis))
