"""The aligned layout: every pair has its own row, in a block of its expert, and none else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.formats.fp8_rows import Fp8Rows, packed_row_bytes
from engine.kernels import expert_reference, reference
from engine.kernels.alignment import (
    COARSE_STEP,
    ROW_BLOCK,
    Overflow,
    max_aligned_rows,
    row_capacity,
    row_steps,
    stepped_rows,
)
from engine.ops.norm import ADD_RMS_NORM_FP8, RMS_NORM
from engine.ops.permute import COUNT_ROWS, MOE_ALIGN_BLOCK_SIZE, PERMUTE_ROWS, UNPERMUTE_ROWS


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
    alignment = MOE_ALIGN_BLOCK_SIZE.reference(ids, first, num_local)
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


@given(routings(), st.integers(0, 12))
def test_every_row_is_before_or_behind_the_capacity(
    case: tuple[torch.Tensor, int, int], num_blocks: int
) -> None:
    ids, first, num_local = case
    capacity, num_tokens = num_blocks * ROW_BLOCK, len(ids)
    whole = MOE_ALIGN_BLOCK_SIZE.reference(ids, first, num_local)
    cut = MOE_ALIGN_BLOCK_SIZE.reference(ids, first, num_local, capacity)
    most = len(whole.expert_M)
    assert torch.equal(cut.rows_TK, whole.rows_TK)
    assert torch.equal(cut.expert_M[:most], whole.expert_M)
    assert (cut.expert_M[most:] == -1).all()
    assert cut.capacity == capacity
    assert len(cut.expert_M) == max(most, capacity)
    hidden = reference.quantize_rows(torch.randn(num_tokens, 128))
    spread = PERMUTE_ROWS.reference(hidden, cut)
    overflow = None if cut.overflow is None else Overflow(source=hidden, places=cut.overflow)
    assert spread.num_rows == capacity
    both = expert_reference.with_overflow(spread, overflow)
    pairs = whole.rows_TK.flatten().long()
    tokens = torch.arange(num_tokens).repeat_interleave(ids.shape[1])[pairs >= 0]
    used = pairs[pairs >= 0]
    assert torch.equal(both.dequantize()[used], hidden.dequantize()[tokens])
    if cut.overflow is not None:
        counts = COUNT_ROWS.reference(ids, first, num_local)
        assert torch.equal(cut.overflow.ends_E, counts.ends_E)


@given(
    num_tokens=st.integers(0, 20_000),
    num_experts=st.sampled_from([1, 8, 32, 256]),
    num_ranks=st.sampled_from([1, 2, 8]),
)
def test_the_capacity_is_a_little_more_than_even_routing_needs(
    num_tokens: int, num_experts: int, num_ranks: int
) -> None:
    num_pairs = 8 * num_tokens
    capacity = row_capacity(num_pairs, num_experts, num_ranks)
    most = max_aligned_rows(num_pairs, num_experts)
    assert capacity in [0, *row_steps(capacity)]
    assert capacity <= stepped_rows(most)
    share = -(-num_pairs // num_ranks)
    per_expert = [(share + index) // num_experts for index in range(num_experts)]
    needed = sum(-(-count // ROW_BLOCK) * ROW_BLOCK for count in per_expert)
    mean = share + min(num_experts, share) * ROW_BLOCK / 2
    if share >= 16 * ROW_BLOCK * num_experts:  # padding is a small part
        assert needed <= capacity + num_experts * ROW_BLOCK / 2
        assert capacity <= 1.1 * mean + COARSE_STEP
    if most > capacity:
        assert most - capacity > COARSE_STEP, "a few rows behind it would cost more than they spare"


def test_the_capacity_of_known_layouts() -> None:
    """16,384 tokens of DeepSeek-V3: one of eight ranks, and all experts on one rank."""
    assert row_capacity(8 * 16384, 32, 8) == 19968
    assert max_aligned_rows(8 * 16384, 32) == 135168
    assert row_capacity(8 * 16384, 256, 1) == 151552
    assert row_capacity(8, 256, 1) == row_capacity(8, 32, 8) == 1024 == max_aligned_rows(8, 256)


@given(routings())
def test_the_counted_number_of_rows_is_enough(case: tuple[torch.Tensor, int, int]) -> None:
    ids, first, num_local = case
    counts = COUNT_ROWS.reference(ids, first, num_local)
    exact = counts.lay_out(int(counts.num_rows))
    bound = MOE_ALIGN_BLOCK_SIZE.reference(ids, first, num_local)
    assert torch.equal(exact.rows_TK, bound.rows_TK)
    assert torch.equal(exact.expert_M, bound.expert_M[: len(exact.expert_M)])
    assert (exact.expert_M >= 0).all(), "every block belongs to an expert"
    assert (bound.expert_M[len(exact.expert_M) :] == -1).all()


@given(routings())
def test_rows_are_laid_out_in_steps_that_have_room(case: tuple[torch.Tensor, int, int]) -> None:
    ids, first, num_local = case
    counts = COUNT_ROWS.reference(ids, first, num_local)
    used, most = int(counts.num_rows), max_aligned_rows(ids.numel(), num_local)
    chosen = counts.rows_to_lay_out(used)
    assert used <= chosen <= most
    assert chosen == most or chosen in [0, *row_steps(most)]
    assert len(counts.lay_out(chosen).expert_M) == chosen


@given(st.integers(0, 1000))
def test_a_step_is_the_next_one_and_not_far(num_blocks: int) -> None:
    rows = num_blocks * ROW_BLOCK
    steps = [0, *row_steps(rows)]
    assert stepped_rows(rows) == next(step for step in steps if step >= rows)
    assert stepped_rows(rows) == steps[-1], "none is beyond what is asked for"
    assert all(step % ROW_BLOCK == 0 for step in steps)
    assert stepped_rows(rows) - rows < (1024 if rows <= 8192 else 256)


def test_without_local_pairs_there_are_no_rows() -> None:
    ids = torch.tensor([[0, 1], [1, 0]])
    counts = COUNT_ROWS.reference(ids, 4, 2)
    assert int(counts.num_rows) == 0
    alignment = counts.lay_out(0)
    spread = PERMUTE_ROWS.reference(reference.quantize_rows(torch.randn(2, 128)), alignment)
    assert spread.num_rows == 0
    own = torch.randn(2, 128)
    home = UNPERMUTE_ROWS.reference(spread.dequantize(), alignment, torch.rand(2, 2), own)
    assert torch.equal(home, own)


@given(routings(), st.booleans())
def test_rows_come_home_weighted(case: tuple[torch.Tensor, int, int], is_packed: bool) -> None:
    ids, first, num_local = case
    num_tokens, top_k = ids.shape
    hidden = torch.randn(num_tokens, 128)
    out = None
    if is_packed:
        out = Fp8Rows.packed(torch.empty(num_tokens, packed_row_bytes(128), dtype=torch.uint8), 128)
    quantized = reference.quantize_rows(hidden, out)
    alignment = MOE_ALIGN_BLOCK_SIZE.reference(ids, first, num_local)
    spread = PERMUTE_ROWS.reference(quantized, alignment).dequantize()
    weights = torch.rand(num_tokens, top_k)
    home = UNPERMUTE_ROWS.reference(spread, alignment, weights, hidden)
    is_local = (ids >= first) & (ids < first + num_local)
    expected = hidden + quantized.dequantize() * (weights * is_local).sum(1, keepdim=True)
    torch.testing.assert_close(home, expected)


@pytest.mark.parametrize("num_rows", [1, 4, 7])
def test_scales_lie_column_after_column(num_rows: int) -> None:
    rows = Fp8Rows.empty(num_rows, 384, torch.device("cpu"))
    assert rows.scale_TG.shape == (num_rows, 3)
    assert rows.scale_TG.stride() == (1, -(-num_rows // 4) * 4)


@pytest.mark.parametrize("num_rows", [0, 1, 6])
@pytest.mark.parametrize("num_columns", [128, 384, 7168])
def test_packed_rows_hold_what_other_rows_hold(num_rows: int, num_columns: int) -> None:
    x = torch.randn(num_rows, num_columns)
    assert packed_row_bytes(num_columns) % 16 == 0
    buffer = torch.full((num_rows, packed_row_bytes(num_columns)), 0xFF, dtype=torch.uint8)
    packed = Fp8Rows.packed(buffer, num_columns)
    assert reference.quantize_rows(x, packed) is packed
    plain = reference.quantize_rows(x)
    # The bytes travel: another view of a copy of the buffer reads the same rows.
    back = Fp8Rows.packed(buffer.clone(), num_columns)
    assert torch.equal(back.dequantize(), plain.dequantize())
    again = back.column_major()
    if num_rows:
        assert again.scale_TG.stride() == plain.scale_TG.stride()
    assert torch.equal(again.scale_TG, plain.scale_TG)
    assert plain.column_major() is plain


@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("with_plain", [True, False])
def test_add_norm_and_quantise_are_their_steps(with_delta: bool, with_plain: bool) -> None:
    x, delta, weight = torch.randn(5, 256), torch.randn(5, 256), torch.randn(256)
    out = Fp8Rows.packed(torch.empty(5, packed_row_bytes(256), dtype=torch.uint8), 256)
    total, normed, rows = ADD_RMS_NORM_FP8.reference(
        x, delta if with_delta else None, weight, 1e-6, with_plain=with_plain, out=out
    )
    assert rows is out
    assert torch.equal(total, x + delta) if with_delta else total is x
    expected = RMS_NORM.reference(total, weight, 1e-6)
    assert torch.equal(rows.dequantize(), reference.quantize_rows(expected).dequantize())
    assert (normed is not None) == with_plain
    if normed is not None:
        assert torch.equal(normed, expected)


def test_quantised_rows_keep_their_largest_number() -> None:
    x = torch.randn(5, 256) * torch.logspace(-3, 3, 5).unsqueeze(1)
    x[2, 128:] = 0.0
    back = reference.quantize_rows(x).dequantize()
    torch.testing.assert_close(back, x, rtol=2**-4, atol=0.02 * float(x.abs().max(1).values[0]))
    largest = x.abs().view(5, 2, 128).argmax(-1)
    kept = back.view(5, 2, 128).gather(2, largest.unsqueeze(-1))
    torch.testing.assert_close(kept, x.view(5, 2, 128).gather(2, largest.unsqueeze(-1)))
    assert (back[2, 128:] == 0).all()
