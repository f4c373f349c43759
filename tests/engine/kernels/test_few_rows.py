"""Few rows as columns give what the plain products do, whichever rows come together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import few_rows, reference

ROWS = st.integers(1, 6)
SHAPES = st.sampled_from([(16, 32), (512, 256), (192, 512), (100, 1024), (24, 2048)])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(num_rows=ROWS, shape=SHAPES, seed=st.integers(0, 99))
def test_linear(num_rows: int, shape: tuple[int, int], seed: int) -> None:
    x, weight = drawn(num_rows, shape[1], seed=seed), drawn(*shape, seed=seed + 1)
    actual = few_rows.linear(x, weight)
    assert actual.shape == (num_rows, shape[0])
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, F.linear(x, weight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_and_shapes_go_the_plain_way(dtype: torch.dtype) -> None:
    x, weight = drawn(2, 256).to(dtype), drawn(256, 256).to(dtype)
    assert torch.equal(few_rows.linear(x, weight), F.linear(x, weight))
    batch = drawn(2, 2, 256).to(dtype)
    assert torch.equal(few_rows.linear(batch, weight), F.linear(batch, weight))
    assert few_rows.linear(x[:0], weight).shape == (0, 256)


def test_a_row_alone_is_the_same_to_the_bit_as_with_another() -> None:
    """One request without drafts and with one: the same kernel, and the same sums."""
    x, weight = drawn(2, 256), drawn(832, 256)
    both = few_rows.linear(x, weight)
    assert torch.equal(few_rows.linear(x[:1], weight), both[:1])
    assert torch.equal(few_rows.linear(x[1:], weight), both[1:])


@settings(max_examples=30, deadline=None)
@given(num_rows=ROWS, is_transposed=st.booleans(), seed=st.integers(0, 99))
def test_batched(num_rows: int, is_transposed: bool, seed: int) -> None:
    """As attention calls it: rows of all heads side by side, into a part of a larger tensor."""
    x_TBK, weight = drawn(num_rows, 4, 48, seed=seed)[..., :32], drawn(4, 600, 32, seed=seed)
    if is_transposed:
        weight = few_rows.transposed_if_better(weight.mT).mT
        assert weight.stride(2) == 1
    out_TBN = torch.zeros(num_rows, 4, 700)
    few_rows.batched(x_TBK.transpose(0, 1), weight, out_TBN[..., :600].transpose(0, 1))
    expected = torch.einsum("tbk,bnk->tbn", x_TBK, weight)
    torch.testing.assert_close(out_TBN[..., :600], expected, atol=1e-4, rtol=1e-4)
    assert not out_TBN[..., 600:].any()


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 1, 1, 2, 3, 4, 5]), min_size=6, max_size=6).filter(
        any
    ),
    shape=st.sampled_from([(256, 128), (1024, 32), (16, 8)]),
    seed=st.integers(0, 99),
)
def test_grouped_mlp(counts: list[int], shape: tuple[int, int], seed: int) -> None:
    hidden, width = shape
    rows = drawn(sum(counts), hidden, seed=seed)
    w13 = drawn(6, 2 * width, hidden, seed=seed + 1) * hidden**-0.5
    w2 = drawn(6, hidden, width, seed=seed + 2) * width**-0.5
    actual = few_rows.grouped_mlp(rows, counts, w13, w2)
    expected = reference.grouped_mlp(rows, counts, w13, w2)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_an_expert_of_one_row_is_not_told_its_neighbours_result() -> None:
    rows, w13, w2 = drawn(3, 256), drawn(4, 256, 256), drawn(4, 256, 128)
    rows[1] = torch.nan
    out = few_rows.grouped_mlp(rows, [1, 1, 0, 1], w13, w2)
    assert out.isfinite().all(dim=1).tolist() == [True, False, True]
    assert few_rows.grouped_mlp(rows[:0], [0, 0, 0, 0], w13, w2).shape == (0, 256)
