"""Dispatch then combine is a weighted sum over experts; one process. See also `test_ranks`."""

from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.formats.expert_rows import AlignedRows, ExpertRows
from engine.kernels.alignment import max_aligned_rows, stepped_rows
from engine.kernels.expert_reference import with_overflow
from engine.kernels.portable import portable_kernels
from engine.parallel.all_to_all_dispatcher import AllToAllDispatcher
from engine.parallel.gathered_dispatcher import (
    GatheredDispatcher,
    pack_routing,
    unpack_routing,
)
from engine.parallel.groups import RankGroup
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.pending import Ready
from engine.parallel.row_formats import AlignedQuantized, ExpertShare, PlainRows, RowFormat
from engine.parallel.token_dispatcher import TokenDispatcher
from tests.engine.formats.fp8 import fp8_of, quantize
from tests.engine.parallel.fake_ranks import SilentGroup

NUM_EXPERTS = 8


Routing: TypeAlias = tuple[Tensor, Tensor, Tensor]
KERNELS = portable_kernels(has_fp8=True)
CODEC: Any = fp8_of(KERNELS).rows
ALL = ExpertShare(first=0, num_local=NUM_EXPERTS, num_ranks=1)
PLAIN, FP8 = PlainRows(ALL), AlignedQuantized(KERNELS.ops, CODEC, ALL)


def one_rank(rows: RowFormat[Any]) -> list[TokenDispatcher[Any]]:
    kinds = LocalDispatcher, GatheredDispatcher, AllToAllDispatcher
    return [kind(rows, RankGroup()) for kind in kinds]


def draw_routing(seed: int, num_tokens: int, *, top_k: int = 3, size: int = 5) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, size, generator=generator)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    return hidden, scores.topk(top_k, dim=-1).indices, torch.rand(num_tokens, top_k)


def run(
    dispatcher: TokenDispatcher[Any],
    routing: Routing,
    *,
    first: int = 0,
    own: Tensor | None = None,
) -> Tensor:
    """Expert e multiplies by e + 1."""
    rows, handle = dispatcher.start_dispatch(*routing).wait()
    assert isinstance(rows, ExpertRows)
    counts = torch.tensor(rows.num_rows_per_expert)
    assert int(counts.sum()) == rows.rows_MD.shape[0]
    factors = torch.arange(first + 1.0, first + 1 + len(counts)).repeat_interleave(counts)
    out = rows.rows_MD * factors.unsqueeze(1)
    return dispatcher.start_combine(out, handle, None if own is None else Ready(own)).wait()


def expected(routing: Routing) -> Tensor:
    hidden, ids, weights = routing
    return hidden * ((ids + 1) * weights).sum(-1, keepdim=True)


@given(seed=st.integers(0, 1000), num_tokens=st.integers(0, 20))
def test_one_rank(seed: int, num_tokens: int) -> None:
    routing = draw_routing(seed, num_tokens)
    own = torch.ones(num_tokens, 5)
    for dispatcher in one_rank(PLAIN):
        torch.testing.assert_close(run(dispatcher, routing), expected(routing))
        torch.testing.assert_close(run(dispatcher, routing, own=own), expected(routing) + 1)
    assert own.eq(1).all(), "the caller's term is left alone"


@given(seed=st.integers(0, 1000), lost=st.sets(st.integers(0, 8)))
def test_tokens_without_an_expert_go_nowhere(seed: int, lost: set[int]) -> None:
    """They hold NaN; what comes back for them is the rank's own term."""
    hidden, ids, weights = draw_routing(seed, 9, size=256)
    rows = sorted(lost)
    hidden[rows], ids[rows] = torch.nan, -1
    own = torch.randn(9, 256)
    exact = hidden.nan_to_num(0.0) * ((ids + 1) * weights).sum(-1, keepdim=True) + own
    for dispatcher in one_rank(PLAIN):
        torch.testing.assert_close(run(dispatcher, (hidden, ids, weights), own=own), exact)
    for fp8 in one_rank(FP8):
        actual = run_fp8(fp8, (hidden, ids, weights), own.bfloat16())
        torch.testing.assert_close(actual.float(), exact, rtol=0.1, atol=0.5)


def run_fp8(dispatcher: TokenDispatcher[Any], routing: Routing, own: Tensor | None) -> Tensor:
    """The same with rows in FP8, in the aligned layout."""
    hidden, ids, weights = routing
    rows, handle = dispatcher.start_dispatch(quantize(KERNELS, hidden), ids, weights).wait()
    assert isinstance(rows, AlignedRows)
    used = sum(-(-n // 128) * 128 for n in ids[ids >= 0].bincount().tolist())
    most = max_aligned_rows(ids.numel(), NUM_EXPERTS)
    assert used <= rows.expert_M.shape[0] <= stepped_rows(most)
    factors = rows.expert_M.unsqueeze(1) + 1.0
    out = (with_overflow(rows.rows, rows.overflow).dequantize() * factors).bfloat16()
    return dispatcher.start_combine(out, handle, None if own is None else Ready(own)).wait()


@given(seed=st.integers(0, 1000), num_tokens=st.integers(0, 20))
def test_one_rank_in_fp8(seed: int, num_tokens: int) -> None:
    routing = draw_routing(seed, num_tokens, size=256)
    hidden = quantize(KERNELS, routing[0]).dequantize()
    own = torch.ones(num_tokens, 256, dtype=torch.bfloat16)
    for dispatcher in one_rank(FP8):
        assert dispatcher.takes_quantized
        for term in (None, own):
            actual = run_fp8(dispatcher, routing, term)
            assert actual.dtype == torch.bfloat16
            exact = expected((hidden, *routing[1:])) + (0 if term is None else 1)
            torch.testing.assert_close(actual.float(), exact, rtol=0.02, atol=0.05)
    assert own.eq(1).all(), "the caller's term is left alone"


@pytest.mark.parametrize("num_ranks", [1, 8])
@pytest.mark.parametrize("kind", [LocalDispatcher, GatheredDispatcher])
def test_rows_beyond_an_even_share_are_not_lost(kind: type, num_ranks: int) -> None:
    routing = draw_routing(5, 900, size=256)
    share = ExpertShare(first=0, num_local=NUM_EXPERTS, num_ranks=num_ranks)
    dispatcher = kind(AlignedQuantized(KERNELS.ops, CODEC, share), RankGroup())
    hidden = quantize(KERNELS, routing[0])
    rows, _ = dispatcher.start_dispatch(hidden, *routing[1:]).wait()
    assert (rows.overflow is None) == (num_ranks == 1)
    actual = run_fp8(dispatcher, routing, None)
    exact = expected((hidden.dequantize(), *routing[1:]))
    torch.testing.assert_close(actual.float(), exact, rtol=0.02, atol=0.05)


def test_a_pair_of_no_expert_adds_nothing() -> None:
    hidden, ids, weights = draw_routing(0, 6, size=256)
    ids[1], ids[3, 0] = -1, -1
    weights[ids < 0] = torch.nan
    exact = hidden * ((ids + 1) * weights.nan_to_num(0.0)).sum(-1, keepdim=True)
    for dispatcher in one_rank(PLAIN):
        torch.testing.assert_close(run(dispatcher, (hidden, ids, weights)), exact)
    for fp8_dispatcher in one_rank(FP8):
        actual = run_fp8(fp8_dispatcher, (hidden, ids, weights), None)
        torch.testing.assert_close(actual.float(), exact, rtol=0.1, atol=0.3)
        assert not actual[1].any()


@given(seed=st.integers(0, 1000), num_tokens=st.integers(0, 9))
def test_routing_travels_as_one_message(seed: int, num_tokens: int) -> None:
    _, ids, weights = draw_routing(seed, num_tokens)
    packed = pack_routing(ids, weights)
    assert packed.shape == (num_tokens, 6)
    back = unpack_routing(packed)
    assert back[0].equal(ids)
    assert back[1].equal(weights)


@given(seed=st.integers(0, 1000), num_ranks=st.sampled_from([2, 4]))
def test_replicated_ranks_add_up(seed: int, num_ranks: int) -> None:
    routing, share = draw_routing(seed, 11), NUM_EXPERTS // num_ranks
    parts = []
    for rank in range(num_ranks):
        own = ExpertShare(first=rank * share, num_local=share, num_ranks=num_ranks)
        group = SilentGroup(rank=rank, size=num_ranks)
        parts.append(run(LocalDispatcher(PlainRows(own), group), routing, first=own.first))
    torch.testing.assert_close(sum(parts), expected(routing))


def test_sum_is_made_in_float32() -> None:
    hidden = torch.ones(1, 4, dtype=torch.bfloat16)
    ids = torch.arange(8).unsqueeze(0)
    weights = torch.full((1, 8), 2.0**-9)
    own = torch.ones(1, 4, dtype=torch.bfloat16)
    dispatcher = LocalDispatcher(PLAIN, RankGroup())
    rows, handle = dispatcher.start_dispatch(hidden, ids, weights).wait()
    out = dispatcher.start_combine(rows.rows_MD, handle, Ready(own)).wait()
    # Each 2^-9 alone would round away beside 1 in bf16; together they are 2^-6.
    assert out.dtype == torch.bfloat16
    assert out[0, 0].item() == 1 + 2.0**-6
