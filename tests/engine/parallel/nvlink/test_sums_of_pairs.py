"""Experts' results that are summed where they are sent: threads stand for ranks, as elsewhere.

What comes home is, number by number, what a sum per token and a reduce-scatter of those bring.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.formats.expert_rows import AlignedRows
from engine.kernels.masked_rows import MaskedRows
from engine.kernels.portable import portable_kernels
from engine.parallel.gathered_dispatcher import GatheredDispatcher
from engine.parallel.groups import RankGroup
from engine.parallel.nvlink.all_gather import GatherShape
from engine.parallel.nvlink.reduce_scatter import ReduceShape
from engine.parallel.pair_rows import PairRows
from engine.parallel.pending import Ready
from engine.parallel.row_formats import AlignedQuantized, ExpertShare, PlainRows
from engine.parallel.short_rows import ShortQuantized
from runtime.errors import InternalError
from tests.engine.formats.fp8 import fp8_of, quantize
from tests.engine.parallel.nvlink.shared_memory import SharedExchange
from tests.engine.parallel.thread_ranks import Meetings, ThreadGroup, run_ranks

HIDDEN, MOST, LOCAL, TOP_K = 128, 4, 4, 4
KERNELS = portable_kernels(has_fp8=True)
CODEC: Any = fp8_of(KERNELS).rows


class Counted(ThreadGroup):
    """Counts sums of pairs."""

    num_pairs = 0

    def start_sum_of_pairs(self, pairs: PairRows, own: Any = None) -> Any:
        type(self).num_pairs += self.rank == 0
        return super().start_sum_of_pairs(pairs, own)


def draw(seed: int, num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, experts and weights of a rank; some experts are no rank's, some pairs name none."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    ids = torch.rand(num_tokens, num_experts, generator=generator).topk(TOP_K, dim=1).indices
    weights = 2.0 ** torch.randint(-1, 2, ids.shape, generator=generator)
    is_lost = torch.rand(ids.shape, generator=generator) < 0.2
    return hidden, ids.masked_fill(is_lost, -1), weights.masked_fill(is_lost, torch.nan)


def laid_out(rows: AlignedRows | MaskedRows) -> tuple[int, ...]:
    """How many rows experts return: M, or [L, M]."""
    return tuple(rows.expert_M.shape if isinstance(rows, AlignedRows) else rows.data_LMD.shape[:2])


def layer(dispatcher: GatheredDispatcher[Any], seed: int, num_tokens: int, rank: int) -> Tensor:
    """A dispatch and its combine; experts return small whole numbers, which no order changes."""
    hidden, ids, weights = draw(1000 * seed + rank, num_tokens, 5 * LOCAL)
    rows, handle = dispatcher.start_dispatch(quantize(KERNELS, hidden), ids, weights).wait()
    generator = torch.Generator().manual_seed(1000 * seed + rank + 500)
    size = laid_out(rows)
    out = torch.randint(-9, 10, (*size, HIDDEN), generator=generator).bfloat16()
    own = torch.full((num_tokens, HIDDEN), 3.0).bfloat16() if seed % 2 else None
    return dispatcher.start_combine(out, handle, None if own is None else Ready(own)).wait()


def format_of(rank: int, num_ranks: int, max_short: int) -> Any:
    share = ExpertShare(first=rank * LOCAL, num_local=LOCAL, num_ranks=num_ranks)
    aligned = AlignedQuantized(KERNELS.ops, CODEC, share)
    if not max_short:
        return aligned
    return ShortQuantized(ops=KERNELS.ops, aligned=aligned, max_tokens=max_short)


@settings(max_examples=15, deadline=None)
@given(
    counts=st.lists(st.integers(1, MOST + 1), min_size=1, max_size=6),
    num_ranks=st.integers(2, 4),
    seed=st.integers(0, 2**20),
)
@pytest.mark.parametrize("max_short", [0, 2 * MOST])
def test_as_a_sum_per_token_and_a_reduce_scatter(
    max_short: int, counts: list[int], num_ranks: int, seed: int
) -> None:
    """Layer behind layer: routing is gathered again as soon as a rank has its sums."""
    shared = SharedExchange(
        ReduceShape(num_ranks=num_ranks, max_rows=MOST, hidden_size=HIDDEN),
        GatherShape(num_ranks=num_ranks, max_rows=MOST, row_bytes=400),
        seed=seed,
    )
    Counted.num_pairs = 0

    def run(rank: int, meetings: Meetings) -> None:
        group = Counted(rank=rank, size=num_ranks, meetings=meetings)
        form = format_of(rank, num_ranks, max_short)
        by_stores = GatheredDispatcher(form, group.exchanging_by(*shared.open(rank)))
        found = [layer(by_stores, seed + i, n, rank) for i, n in enumerate(counts)]
        by_library = GatheredDispatcher(form, group)
        for i, (count, total) in enumerate(zip(counts, found, strict=True)):
            assert torch.equal(total, layer(by_library, seed + i, count, rank)), i

    run_ranks(num_ranks, run)
    assert Counted.num_pairs == sum(count <= MOST for count in counts)


def test_rows_that_the_host_sorted_are_summed_before() -> None:
    share = ExpertShare(first=0, num_local=LOCAL, num_ranks=1)
    hidden, ids, weights = draw(1, 4, LOCAL)
    rows = PlainRows(share)
    plan = rows.plan(ids, weights)
    out = rows.permute(hidden, plan)
    assert rows.pair_rows(out.rows_MD, plan, ids) is None
    assert not RankGroup().sums_pairs(pairs_of(HIDDEN, torch.bfloat16, 4))


def pairs_of(size: int, dtype: torch.dtype, num_tokens: int) -> PairRows:
    return PairRows(
        rows_MD=torch.zeros(8, size, dtype=dtype),
        places_PK=torch.zeros(num_tokens, TOP_K, dtype=torch.int32),
        weights_PK=torch.zeros(num_tokens, TOP_K),
        own_ids_TK=torch.zeros(1, TOP_K, dtype=torch.int64),
        num_local_experts=LOCAL,
    )


@pytest.mark.parametrize(
    ("size", "dtype", "num_tokens", "fits"),
    [
        (HIDDEN, torch.bfloat16, 2 * MOST, True),
        (HIDDEN, torch.bfloat16, 2, True),
        (HIDDEN, torch.bfloat16, 2 * MOST + 2, False),
        (HIDDEN, torch.bfloat16, 3, False),
        (HIDDEN, torch.float32, 2, False),
        (HIDDEN // 2, torch.bfloat16, 2, False),
    ],
)
def test_what_fits(size: int, dtype: torch.dtype, num_tokens: int, fits: bool) -> None:
    sums, _ = SharedExchange(
        ReduceShape(num_ranks=2, max_rows=MOST, hidden_size=HIDDEN),
        GatherShape(num_ranks=2, max_rows=MOST, row_bytes=400),
        seed=0,
    ).open(0)
    assert sums.takes_pairs(pairs_of(size, dtype, num_tokens)) is fits


@pytest.mark.parametrize("max_short", [0, 2 * MOST])
def test_fewer_rows_than_were_laid_out_are_refused(max_short: int) -> None:
    form = format_of(0, 1, max_short)
    hidden, ids, weights = draw(1, MOST, LOCAL)
    plan = form.plan(ids, weights)
    rows = form.permute(quantize(KERNELS, hidden), plan)
    size = laid_out(rows)
    with pytest.raises(InternalError, match="rows to be summed"):
        form.pair_rows(torch.zeros(size[0] - 1, *size[1:], HIDDEN).bfloat16(), plan, ids)
