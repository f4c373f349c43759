"""Noise: uniform, independent of the batch, and fixed for ever by its coordinates."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.noise import gumbel, row_key, uniform

seeds = st.integers(0, 2**64 - 1)


def splitmix64(word: int) -> int:
    """SplitMix64's finaliser, written out."""
    mask = 2**64 - 1
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return word ^ (word >> 31)


@given(seeds, st.integers(0, 2**20))
@settings(deadline=None)
def test_uniform_is_the_published_hash(seed: int, index: int) -> None:
    mask, weyl = 2**64 - 1, 0x9E3779B97F4A7C15
    key = splitmix64((splitmix64((seed + weyl) & mask) + (index + 1) * weyl) & mask)
    assert row_key(seed, index) & mask == key
    expected = [
        ((splitmix64((key + column * weyl) & mask) >> 24) + 0.5) / 2**40 for column in range(5)
    ]
    actual = uniform([row_key(seed, index)], 5, "cpu")[0].tolist()
    assert actual == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.tuples(seeds, st.integers(0, 1000)), min_size=1, max_size=6), st.data())
@settings(deadline=None)
def test_a_row_depends_on_its_key_alone(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    keys = [row_key(*pair) for pair in pairs]
    row = data.draw(st.integers(0, len(keys) - 1))
    alone = gumbel([keys[row]], 33, "cpu")
    assert torch.equal(gumbel(keys, 33, "cpu")[row], alone[0])
    assert torch.equal(gumbel(keys, 17, "cpu")[row], alone[0, :17])


def test_uniform_is_inside_the_open_interval_and_flat() -> None:
    values = uniform([row_key(7, index) for index in range(64)], 4096, "cpu")
    assert values.min() > 0
    assert values.max() < 1
    counts = torch.histc(values, bins=64, min=0, max=1)
    expected = values.numel() / 64
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 63 + 5 * math.sqrt(2 * 63)  # 63 degrees of freedom, 5 sigma


@pytest.mark.parametrize("step", ["seed", "index", "column"])
def test_neighbours_are_uncorrelated(step: str) -> None:
    size = 1 << 16
    if step == "column":
        values = uniform([row_key(3, 0)], size + 1, "cpu")[0]
        first, second = values[:-1], values[1:]
    else:
        keys = [row_key(3, 0), row_key(4, 0) if step == "seed" else row_key(3, 1)]
        first, second = uniform(keys, size, "cpu")
    correlation = torch.corrcoef(torch.stack((first, second)))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(size)


def test_gumbel_has_its_mean_and_variance() -> None:
    values = gumbel([row_key(1, index) for index in range(64)], 4096, "cpu").double()
    assert torch.isfinite(values).all()
    assert values.mean().item() == pytest.approx(0.5772156649, abs=0.02)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
