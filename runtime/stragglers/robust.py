"""Statistics that a few ranks, steps or blocks far out of the ordinary do not move. Pure."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from runtime.stragglers.rank_waits import Floats

_NORMAL_MAD: Final = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""
_FAR: Final = 4.0
"""Robust deviations, that nothing counts more than."""
_OUTER: Final = 5
"""Of so many values one at each end does not count for the middle."""
_OF_MIDDLE: Final = 1.065
"""Deviation of the mean of the middle of normal values, by that of the mean of all of them; that of
the median is 1.2."""


def middle_mean(values: Floats, axis: int) -> Floats:
    """Return the mean along an axis without the highest and the lowest fifth.

    Nearly as certain as a mean, and nothing that befalls a fifth of the values moves it.
    """
    count = values.shape[axis]
    outer = count // _OUTER
    kept = np.sort(values, axis=axis).take(range(outer, count - outer), axis=axis)
    return np.asarray(kept.mean(axis=axis))


def deviation_of_middle(count: int) -> float:
    """Return the deviation of the middle mean of so many values, by that of one."""
    return (_OF_MIDDLE if count >= _OUTER else 1.0) / math.sqrt(count)


def block_noise(figures: Floats) -> float:
    """Return what figures vary by from block to block, [B, ...], by the deviations of all of them.

    The root of their mean square, which few blocks tell better than a MAD does; what is far out of
    the ordinary counts as `_FAR` of those, so that a pause does not hide what is slow.
    """
    num_blocks = len(figures)
    if num_blocks < 2:
        return 0.0
    apart = np.abs(figures - middle_mean(figures, 0)).reshape(num_blocks, -1)
    varying = apart[:, apart.any(axis=0)]
    if not varying.size:
        return 0.0
    far = _FAR * _NORMAL_MAD * float(np.median(varying))
    # Deviations are from what the same blocks have in their middle.
    square = float(np.mean(np.minimum(varying, far) ** 2)) * num_blocks / (num_blocks - 1)
    return float(square**0.5)


def student_quantile(normal: float, num_degrees: float) -> float:
    """Return what a deviation in units of an *estimated* noise must be, to be as rare.

    Args:
        normal: the deviation in units of a noise that is known, 3 to 6.
        num_degrees: of freedom of the estimate; a few are enough for three digits.
    """
    cube, fifth = normal**3, normal**5
    first = (cube + normal) / (4.0 * num_degrees)
    second = (5.0 * fifth + 16.0 * cube + 3.0 * normal) / (96.0 * num_degrees**2)
    return normal + first + second


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
