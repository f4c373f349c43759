"""Paged attention over a pool's strided layers, and latents stored in every dtype of a pool."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention import paged_reference
from engine.attention.latent_storage import put_rows, take_blocks
from engine.attention.paged_queries import PagedQueries, QueryCounts
from engine.kernels import reference

BLOCK_SIZE, NUM_LAYERS, HEADS, RANK, ROPE = 4, 3, 3, 16, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def paged_case(lengths: list[int], dtype: torch.dtype, width: int) -> tuple[Tensor, PagedQueries]:
    """Return a pool of NaN except for the sequences' latents in layer 1, and their queries."""
    torch.manual_seed(sum(lengths))
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    ids = (torch.randperm(sum(counts)) + 1).tolist()
    pool = torch.full((sum(counts) + 1, NUM_LAYERS, BLOCK_SIZE, RANK + ROPE), float("nan"))
    pool = pool.to(dtype)
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = torch.tensor([ids.pop() for _ in range(count)])
        tables[row, :count] = blocks.int()
        positions = torch.arange(length)
        slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        put_rows(pool[:, 1], slots, torch.randn(length, RANK + ROPE))
    return pool, PagedQueries(
        block_tables_SB=tables, seq_lens_S=torch.tensor(lengths, dtype=torch.int32)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[1], [4, 1, 9], [17, 16, 15, 2, 32]])
def test_sequences_attend_to_their_own_pages_only(lengths: list[int], dtype: torch.dtype) -> None:
    pool, queries = paged_case(lengths, dtype, width=9)
    q_SHL = torch.randn(len(lengths), HEADS, RANK + ROPE)
    actual = paged_reference.paged_attention(q_SHL, pool[:, 1], queries, RANK, 0.3)
    for row, length in enumerate(lengths):
        blocks = take_blocks(pool[:, 1], queries.block_tables_SB[row].long())
        latents = blocks.flatten(0, 1)[:length].float().unsqueeze(0)
        nothing_hidden = torch.zeros(1, 1, length, dtype=torch.bool)
        expected = reference.absorbed_attention(
            q_SHL[row].view(1, 1, HEADS, -1), latents, nothing_hidden, RANK, 0.3
        )
        torch.testing.assert_close(actual[row], expected[0, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back_as_they_were_rounded(dtype: torch.dtype) -> None:
    pool = torch.zeros(3, 2, BLOCK_SIZE, 8).to(dtype)
    rows = torch.randn(5, 8) * 3
    put_rows(pool[:, 1], torch.tensor([4, 5, 7, 8, 11]), rows)
    stored = take_blocks(pool[:, 1], torch.tensor([[1, 2]])).flatten(0, 2)[[0, 1, 3, 4, 7]]
    assert stored.dtype == dtype
    torch.testing.assert_close(stored.float(), rows.to(dtype).float(), rtol=0, atol=0)
    assert not pool[:, 0].float().any()
    assert not pool[0].float().any()


def test_what_e4m3_cannot_hold_saturates() -> None:
    pool = torch.zeros(1, 1, BLOCK_SIZE, 2).to(torch.float8_e4m3fn)
    put_rows(pool[:, 0], torch.tensor([0]), torch.tensor([[1e6, -465.0]]))
    assert pool[0, 0, 0].float().tolist() == [448.0, -448.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 4, 3], [17, 1, 9], [5, 0, 9]])
def test_queries_see_the_positions_up_to_their_own(counts: list[int], dtype: torch.dtype) -> None:
    lengths = [17, 4, 9]
    pool, single = paged_case(lengths, dtype, width=7)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    queries = replace(single, counts=QueryCounts(cu_seqlens_q=starts, most=max(counts)))
    q_THL = torch.randn(sum(counts), HEADS, RANK + ROPE)
    actual = paged_reference.paged_attention(q_THL, pool[:, 1], queries, RANK, 0.3)
    for row, length in enumerate(lengths):
        for index in range(counts[row]):
            visible = length - counts[row] + index + 1
            place = int(starts[row]) + index
            alone = PagedQueries(
                block_tables_SB=single.block_tables_SB[row : row + 1],
                seq_lens_S=torch.tensor([visible], dtype=torch.int32),
            )
            one = q_THL[place : place + 1]
            expected = paged_reference.paged_attention(one, pool[:, 1], alone, RANK, 0.3)
            torch.testing.assert_close(actual[place : place + 1], expected)


def test_a_sequence_without_positions_attends_to_nothing() -> None:
    pool, queries = paged_case([4, 1], torch.float32, width=3)
    empty = replace(queries, seq_lens_S=torch.tensor([4, 0], dtype=torch.int32))
    q_THL = torch.randn(2, HEADS, RANK + ROPE)
    actual = paged_reference.paged_attention(q_THL, pool[:, 1], empty, RANK, 0.3)
    assert actual[0].any()
    assert torch.equal(actual[1], torch.zeros_like(actual[1]))


def test_few_queries_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, queries = paged_case([17, 16, 15, 2, 32], torch.bfloat16, width=9)
    q_THL = torch.randn(5, HEADS, RANK + ROPE)
    expected = paged_reference.paged_attention(q_THL, pool[:, 1], queries, RANK, 0.3)
    seen = []

    def attend(q_SQHL: Tensor, *rest: Any) -> Tensor:
        seen.append(q_SQHL.shape[0])
        return reference.absorbed_attention(q_SQHL, *rest)

    monkeypatch.setattr(paged_reference, "absorbed_attention", attend)
    monkeypatch.setattr(paged_reference, "MAX_BYTES", 2 * 8 * 36 * (RANK + ROPE + HEADS))
    actual = paged_reference.paged_attention(q_THL, pool[:, 1], queries, RANK, 0.3)
    assert seen == [2, 2, 1]
    torch.testing.assert_close(actual, expected)
