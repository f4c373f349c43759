"""Two micro-batches hold what the step held, each is a step of its own, and they are balanced."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import ForwardBatch, pack_forward_batch
from engine.micro_batches import (
    GRANULARITY,
    MAX_IMBALANCE,
    OverlapRule,
    choose_cut,
    halve,
    split_batch,
)

BLOCK_SIZE = 4
LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 15)), min_size=1, max_size=6)


def make_batch(lengths: list[tuple[int, int]]) -> ForwardBatch:
    """Sequences of (tokens of the step, tokens before); sequence s owns blocks 10 s + 1, ..."""
    queries = np.array([n for n, _ in lengths], dtype=np.int64)
    contexts = queries + np.array([before for _, before in lengths], dtype=np.int64)
    width = -(-int(contexts.max()) // BLOCK_SIZE)
    tables = 10 * np.arange(len(lengths), dtype=np.int32)[:, None] + np.arange(
        1, width + 1, dtype=np.int32
    )
    return pack_forward_batch(
        np.arange(queries.sum()),
        queries,
        contexts,
        tables,
        logits_indices=queries.cumsum() - 1,
        block_size=BLOCK_SIZE,
    )


@given(lengths=LENGTHS, data=st.data())
def test_parts_are_the_steps_that_would_have_been_built(
    lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    batch = make_batch(lengths)
    cut = data.draw(st.integers(0, batch.num_tokens))
    first, second = split_batch(batch, cut)
    assert (first.num_tokens, second.num_tokens) == (cut, batch.num_tokens - cut)
    parts: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    left = cut
    for queries, before in lengths:
        here = min(queries, left)
        if here:
            parts[0].append((here, before))
        if here < queries:
            parts[1].append((queries - here, before + here))
        left -= here
    for part, expected_lengths in zip((first, second), parts, strict=True):
        assert part.lengths == tuple((n, n + before) for n, before in expected_lengths)
        assert part.seq_lens.tolist() == [n + before for n, before in expected_lengths]
        ends = np.cumsum([0, *(n for n, _ in expected_lengths)])
        assert part.cu_seqlens_q.tolist() == ends.tolist()
        assert part.cu_seqlens_q.dtype == part.seq_lens.dtype == torch.int32
        assert part.max_seqlen_q == max((n for n, _ in expected_lengths), default=0)
        assert part.num_seqs == part.block_tables.shape[0] == len(expected_lengths)
        assert part.logits_indices.shape == (0,)
        # Positions and slots follow from lengths and tables, as in a step built from scratch.
        positions = [p for n, before in expected_lengths for p in range(before, before + n)]
        assert part.positions.tolist() == positions
        rows = [row for row, (n, _) in enumerate(expected_lengths) for _ in range(n)]
        slots = [
            int(part.block_tables[row, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
            for row, p in zip(rows, positions, strict=True)
        ]
        assert part.slot_mapping.tolist() == slots
    assert torch.cat((first.input_ids, second.input_ids)).equal(batch.input_ids)


@given(lengths=LENGTHS)
def test_halves_have_a_token_each(lengths: list[tuple[int, int]]) -> None:
    """Of one token alone the second is padding, which comes to no expert."""
    batch = make_batch(lengths)
    first, second = halve(batch)
    assert first.num_tokens
    assert second.num_tokens
    joined = torch.cat((first.input_ids, second.input_ids))
    assert joined[: batch.num_tokens].equal(batch.input_ids)
    assert first.logits_indices.shape == second.logits_indices.shape == (0,)
    assert first.num_rows is None
    if batch.num_tokens > 1:
        assert len(joined) == batch.num_tokens
        assert second.num_rows is None
    else:
        assert second.num_rows is not None
        assert second.num_rows.tolist() == [0]


def test_both_halves_of_what_an_idle_rank_runs_are_padding() -> None:
    for half in halve(ForwardBatch.dummy()):
        assert half.num_rows is not None
        assert (half.num_tokens, half.num_rows.tolist()) == (1, [0])


@given(query_lens=st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_cuts_are_balanced(query_lens: list[int]) -> None:
    total, cut = sum(query_lens), choose_cut(query_lens)
    ends = set(np.cumsum([0, *query_lens]).tolist())
    assert 0 <= cut <= total
    if cut in ends:
        assert abs(cut - total / 2) <= max(total * MAX_IMBALANCE, GRANULARITY)
    else:
        assert total / 2 - GRANULARITY <= cut <= total / 2
        assert all(abs(end - total / 2) > total * MAX_IMBALANCE for end in ends)
        assert cut % GRANULARITY == 0 or total < 2 * GRANULARITY


@pytest.mark.parametrize(
    ("query_lens", "cut"),
    [
        ([4096] * 4, 8192),
        ([16384], 8192),
        ([1], 0),
        ([], 0),
        ([1, 1], 1),
        ([1000, 1100], 1000),
        ([100, 900], 448),
    ],
)
def test_examples(query_lens: list[int], cut: int) -> None:
    assert choose_cut(query_lens) == cut


def test_a_rule_without_a_meaning_is_refused() -> None:
    for wrong in ({"lag": -1}, {"min_tokens": -1}):
        with pytest.raises(ValueError, match="at least 0"):
            OverlapRule(**wrong)
