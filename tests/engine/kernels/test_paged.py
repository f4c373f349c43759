"""Paged attention over a pool's strided layers, and latents stored in every dtype of a pool."""

import pytest
import torch
from torch import Tensor

from engine.kernels import paged_reference, reference
from engine.kernels.latent_storage import put_rows, take_blocks
from engine.kernels.paged_queries import PagedQueries

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
