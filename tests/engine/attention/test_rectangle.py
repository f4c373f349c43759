"""Sequences of unequal queries attend the same as a rectangle, whoever fills it up."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.absorb_reference import collect, spread
from engine.attention.flash_mla import KV_LORA_RANK, LATENT_DIM, PAGE, FlashMLA
from engine.attention.paged_queries import PagedQueries, QueryCounts
from engine.attention.paged_reference import paged_attention
from engine.attention.rectangle import Rectangle

BLOCK, HEADS, RANK, LATENT, WIDTH = 4, 2, 16, 20, 6

sequences = st.lists(
    st.tuples(st.integers(0, WIDTH), st.integers(0, 17)).filter(any), min_size=1, max_size=5
).filter(lambda pairs: any(queries for queries, _ in pairs))


@given(pairs=sequences, seed=st.integers(0, 99))
@settings(deadline=None)
def test_attention_of_a_rectangle_is_that_of_its_rows(
    pairs: list[tuple[int, int]], seed: int
) -> None:
    torch.manual_seed(seed)
    counts = torch.tensor([queries for queries, _ in pairs])
    lens = torch.tensor([queries + earlier for queries, earlier in pairs], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    total = int(starts[-1])
    num_blocks = -(-int(lens.max()) // BLOCK)
    tables = 1 + torch.randperm(len(pairs) * num_blocks).view(len(pairs), -1).int()
    cache = torch.randn(1 + tables.numel(), BLOCK, LATENT, dtype=torch.float64)
    q = torch.randn(total, HEADS, LATENT, dtype=torch.float64)
    single = PagedQueries(block_tables_SB=tables, seq_lens_S=lens)
    ragged = replace(single, counts=QueryCounts(cu_seqlens_q=starts, most=WIDTH))
    expected = paged_attention(q, cache, ragged, RANK, 0.3)
    rectangle = Rectangle.of(starts, WIDTH, total)
    even = torch.arange(len(pairs) + 1, dtype=torch.int32) * WIDTH
    filled = replace(single, counts=QueryCounts(cu_seqlens_q=even, most=WIDTH))
    spread = rectangle.spread(q)
    assert spread.shape == (len(pairs) * WIDTH, HEADS, LATENT)
    actual = rectangle.collect(paged_attention(spread, cache, filled, RANK, 0.3))
    torch.testing.assert_close(actual, expected)
    assert len(set(rectangle.places.tolist())) == total


class FakeLibrary:
    """What the kernel is called with, attended to by the reference."""

    def plan(self, seq_lens: Tensor, num_rows: int, num_heads_k: int, **_: object) -> Any:
        self.num_rows = num_rows
        return torch.zeros(1, 8), torch.zeros(len(seq_lens) + 1)

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        tables: Tensor,
        lens: Tensor,
        rank: int,
        *_: object,
        **how: Any,
    ) -> tuple[Tensor, None]:
        num_seqs, most = q.shape[:2]
        assert how["causal"] == (most > 1)
        even = torch.arange(num_seqs + 1, dtype=torch.int32) * most
        counts = QueryCounts(cu_seqlens_q=even, most=most)
        queries = PagedQueries(block_tables_SB=tables, seq_lens_S=lens, counts=counts)
        flat = paged_attention(q.flatten(0, 1), cache[:, :, 0], queries, rank, how["softmax_scale"])
        return flat.view(num_seqs, most, *flat.shape[1:]), None

    def kernel(self) -> FlashMLA:
        made = FlashMLA.__new__(FlashMLA)
        made._plan, made._run, made._own_schedule = self.plan, self.run, False
        made._schedule_type = lambda **_: None
        return made


@pytest.mark.parametrize(
    ("counts", "is_known"), [([3, 3], True), ([3, 3], False), ([1, 3, 2, 0], False)]
)
def test_flash_mla_is_given_equally_many_queries(counts: list[int], is_known: bool) -> None:
    torch.manual_seed(0)
    lens = torch.tensor([70 + count for count in counts], dtype=torch.int32)
    tables = 1 + torch.randperm(2 * len(counts)).view(-1, 2).int()
    cache = torch.randn(1 + tables.numel(), PAGE, LATENT_DIM).bfloat16()
    q = torch.randn(sum(counts), 2, LATENT_DIM).bfloat16()
    queries = PagedQueries(
        block_tables_SB=tables,
        seq_lens_S=lens,
        counts=QueryCounts(
            cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int(),
            most=max(counts),
            lengths=list(zip(counts, lens.tolist(), strict=True)) if is_known else [],
            total=sum(counts),
        ),
    )
    library = FakeLibrary()
    kernel = library.kernel()
    assert kernel.takes_queries(queries, torch.bfloat16)
    planned = kernel.plan(queries, 2, torch.bfloat16)
    assert library.num_rows == 2 * max(counts)
    is_full = sum(counts) == len(counts) * max(counts)
    assert (planned.rectangle is None) == (is_known or is_full)
    assert planned.schedule is not None
    out = kernel.paged_attention(spread(q, planned), cache, planned, planned.schedule, 0.04)
    actual = collect(out, planned)
    assert torch.equal(actual, paged_attention(q, cache, queries, KV_LORA_RANK, 0.04))


def test_flash_mla_takes_unequal_queries_only_where_they_are_cut_for_it() -> None:
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    counts = QueryCounts(cu_seqlens_q=starts, most=3, lengths=[(3, 9), (2, 4)], total=5)
    queries = PagedQueries(
        block_tables_SB=torch.zeros(2, 1, dtype=torch.int32), seq_lens_S=starts[:2], counts=counts
    )
    kernel = FakeLibrary().kernel()
    assert not kernel.takes_queries(queries, torch.bfloat16)
    fixed = replace(queries, counts=replace(counts, lengths=()))
    assert kernel.takes_queries(fixed, torch.bfloat16)
    assert not kernel.takes_queries(fixed, torch.float8_e4m3fn)
    assert not kernel.takes_queries(
        replace(fixed, counts=replace(counts, lengths=(), total=0)), torch.bfloat16
    )
    assert kernel.takes_queries(replace(queries, counts=None), torch.float8_e4m3fn)


def test_equal_numbers_are_known_on_the_host_alone() -> None:
    starts = torch.tensor([0, 3, 6], dtype=torch.int32)
    assert QueryCounts(cu_seqlens_q=starts, most=3, lengths=[(3, 9), (3, 4)]).are_equal
    assert not QueryCounts(cu_seqlens_q=starts, most=3, lengths=[(3, 9), (2, 4)]).are_equal
    assert not QueryCounts(cu_seqlens_q=starts, most=3).are_equal
