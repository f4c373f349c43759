"""The aligned layout: every pair has its own row, in a block of its expert, and none else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import reference
from engine.kernels.alignment import ROW_BLOCK, max_aligned_rows
from engine.kernels.fp8_rows import Fp8Rows


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    num_experts = draw(st.integers(1, 12))
    top_k = draw(st.integers(1, num_experts))
    num_tokens = draw(st.sampled_from([1, 2, 17, 200]))
    seed = draw(st.integers(0, 1000))
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    first = draw(st.integers(0, num_experts - 1))
    return scores.topk(top_k).indices, first, draw(st.integers(1, num_experts - first))


@given(routings())
def test_each_local_pair_has_a_row_of_its_expert(case: tuple[torch.Tensor, int, int]) -> None:
    ids, first, num_local = case
    alignment = reference.align_to_experts(ids, first, num_local)
    assert len(alignment.expert_M) == max_aligned_rows(ids.numel(), num_local)
    assert len(alignment.expert_M) % ROW_BLOCK == 0
    rows, experts = alignment.rows_TK.flatten().long(), ids.flatten() - first
    is_local = (experts >= 0) & (experts < num_local)
    assert torch.equal(rows >= 0, is_local)
    used = rows[is_local]
    assert len(set(used.tolist())) == len(used)
    assert torch.equal(alignment.expert_M[used].long(), experts[is_local])
    blocks = alignment.expert_M.view(-1, ROW_BLOCK)
    assert (blocks == blocks[:, :1]).all(), "a block has one expert"
    assert set(blocks[:, 0].tolist()) - {-1} == set(experts[is_local].tolist())


@given(routings())
def test_rows_come_home_weighted(case: tuple[torch.Tensor, int, int]) -> None:
    ids, first, num_local = case
    num_tokens, top_k = ids.shape
    hidden = torch.randn(num_tokens, 128)
    quantized = reference.quantize_rows(hidden)
    alignment = reference.align_to_experts(ids, first, num_local)
    spread = reference.spread_rows(quantized, alignment).dequantize()
    weights = torch.rand(num_tokens, top_k)
    home = reference.gather_rows(spread, alignment, weights, hidden)
    is_local = (ids >= first) & (ids < first + num_local)
    expected = hidden + quantized.dequantize() * (weights * is_local).sum(1, keepdim=True)
    torch.testing.assert_close(home, expected)


@pytest.mark.parametrize("num_rows", [1, 4, 7])
def test_scales_lie_column_after_column(num_rows: int) -> None:
    rows = Fp8Rows.empty(num_rows, 384, torch.device("cpu"))
    assert rows.scale_TG.shape == (num_rows, 3)
    assert rows.scale_TG.stride() == (1, -(-num_rows // 4) * 4)


def test_quantised_rows_keep_their_largest_number() -> None:
    x = torch.randn(5, 256) * torch.logspace(-3, 3, 5).unsqueeze(1)
    x[2, 128:] = 0.0
    back = reference.quantize_rows(x).dequantize()
    torch.testing.assert_close(back, x, rtol=2**-4, atol=0.02 * float(x.abs().max(1).values[0]))
    largest = x.abs().view(5, 2, 128).argmax(-1)
    kept = back.view(5, 2, 128).gather(2, largest.unsqueeze(-1))
    torch.testing.assert_close(kept, x.view(5, 2, 128).gather(2, largest.unsqueeze(-1)))
    assert (back[2, 128:] == 0).all()
