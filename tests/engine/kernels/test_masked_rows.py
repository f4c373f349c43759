"""The masked layout: every pair has its own row among its expert's first ones, and comes home."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.formats.expert_rows import AlignedRows
from engine.formats.fp8_rows import Fp8Rows, packed_row_bytes
from engine.formats.stored_weight import StoredWeight
from engine.kernels import reference
from engine.kernels.masked_rows import MASKED_BLOCK, guess_rows, max_masked_rows
from engine.kernels.portable import portable_kernels
from engine.ops.masked import MOE_ALIGN_MASKED, PERMUTE_MASKED_ROWS
from engine.ops.permute import MOE_ALIGN_BLOCK_SIZE, UNPERMUTE_ROWS
from engine.weights.fp8 import quantize_block
from tests.engine.formats.fp8 import fp8_of, quantize


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    num_experts = draw(st.integers(1, 12))
    top_k = draw(st.integers(1, num_experts))
    num_tokens = draw(st.sampled_from([0, 1, 2, 17, 130]))
    seed = draw(st.integers(0, 1000))
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    first = draw(st.integers(0, num_experts - 1))
    return scores.topk(top_k).indices, first, draw(st.integers(1, num_experts - first))


@given(routings())
def test_each_local_pair_has_a_row_of_its_expert(case: tuple[torch.Tensor, int, int]) -> None:
    ids, first, num_local = case
    max_rows = max_masked_rows(len(ids))
    places = MOE_ALIGN_MASKED.reference(ids, first, num_local, max_rows)
    assert places.rows_TK.dtype == places.num_rows_L.dtype == torch.int32
    rows, experts = places.rows_TK.flatten(), ids.flatten() - first
    is_local = (experts >= 0) & (experts < num_local)
    assert torch.equal(rows >= 0, is_local)
    for expert in range(num_local):
        mine = rows[experts == expert]
        assert int(places.num_rows_L[expert]) == len(mine)
        # The first rows, in the order of the tokens.
        assert mine.tolist() == list(range(expert * max_rows, expert * max_rows + len(mine)))


@given(routings(), st.booleans())
def test_rows_come_home_weighted(case: tuple[torch.Tensor, int, int], is_packed: bool) -> None:
    ids, first, num_local = case
    num_tokens, top_k = ids.shape
    hidden = torch.randn(num_tokens, 256)
    out = None
    if is_packed:
        out = Fp8Rows.packed(torch.empty(num_tokens, packed_row_bytes(256), dtype=torch.uint8), 256)
    quantized = reference.quantize_rows(hidden, out)
    places = MOE_ALIGN_MASKED.reference(ids, first, num_local, max_masked_rows(num_tokens))
    masked = PERMUTE_MASKED_ROWS.reference(quantized, places)
    max_rows = places.max_rows
    assert masked.data_LMD.shape == (num_local, max_rows, 256)
    assert masked.scale_LMG.stride() == (2 * max_rows, 1, max_rows)
    rows = Fp8Rows(data_TK=masked.data_LMD.flatten(0, 1), scale_TG=masked.scale_LMG.flatten(0, 1))
    weights = torch.rand(num_tokens, top_k)
    home = UNPERMUTE_ROWS.reference(rows.dequantize(), places, weights, hidden)
    is_local = (ids >= first) & (ids < first + num_local)
    expected = hidden + quantized.dequantize() * (weights * is_local).sum(1, keepdim=True)
    torch.testing.assert_close(home, expected)


def test_experts_agree_with_the_contiguous_layout() -> None:
    kernels = portable_kernels(has_fp8=True)
    num_tokens, first, num_local = 40, 2, 5
    ids = torch.rand(num_tokens, 8).topk(3).indices
    weights = torch.rand(num_tokens, 3)
    pairs = [
        [quantize_block(torch.randn(rows, columns) / columns**0.5) for _ in range(num_local)]
        for rows, columns in ((512, 128), (128, 256))
    ]
    w13, w2 = (
        StoredWeight(torch.stack([w for w, _ in part]), torch.stack([s for _, s in part]))
        for part in pairs
    )
    rows = quantize(kernels, torch.randn(num_tokens, 128))
    alignment = kernels.ops[MOE_ALIGN_BLOCK_SIZE](ids, first, num_local)
    aligned = AlignedRows.permute(kernels.ops, rows, alignment)
    out = fp8_of(kernels).grouped_mlp(aligned, w13, w2)
    expected = kernels.ops[UNPERMUTE_ROWS](out, alignment, weights, None)
    places = kernels.ops[MOE_ALIGN_MASKED](ids, first, num_local, 128)
    masked = fp8_of(kernels).masked_mlp(kernels.ops[PERMUTE_MASKED_ROWS](rows, places), w13, w2)
    assert masked.shape == (num_local, 128, 128)
    actual = kernels.ops[UNPERMUTE_ROWS](masked.flatten(0, 1), places, weights, None)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("num_tokens", "rows"), [(0, 128), (1, 128), (128, 128), (129, 256)])
def test_the_room_for_an_expert_is_whole_tiles(num_tokens: int, rows: int) -> None:
    assert max_masked_rows(num_tokens) == rows
    assert rows % MASKED_BLOCK == 0


def test_the_guess_is_the_mean_of_even_routing() -> None:
    assert guess_rows(256, 8, 256) == 8
    assert guess_rows(1, 8, 256) == guess_rows(0, 8, 256) == 1
    ids = torch.rand(6, 8).topk(2).indices
    assert MOE_ALIGN_MASKED.reference(ids, 0, 4, 128).expected_rows == 3
    chosen = MOE_ALIGN_MASKED.reference(ids, 0, 4, 128, expected_rows=2)
    assert chosen.expected_rows == 2
