"""Batches: every row against a plain per-token computation."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import ForwardBatch, build_forward_batch
from engine.request import Request, ScheduledRequest, num_blocks_for
from runtime.sampling import SamplingParams

BLOCK_SIZE = 4


@st.composite
def scheduled_requests(draw: st.DrawFn) -> list[ScheduledRequest]:
    """Requests with random progress, whose blocks are distinct and more than needed."""
    scheduled: list[ScheduledRequest] = []
    next_block = 1
    for index in range(draw(st.integers(1, 5))):
        num_prompt, num_output = draw(st.integers(1, 20)), draw(st.integers(0, 6))
        num_tokens = num_prompt + num_output
        computed = draw(st.integers(0, num_tokens - 1))
        num_blocks = num_blocks_for(num_tokens, BLOCK_SIZE) + draw(st.integers(0, 2))
        request = Request(
            request_id=str(index),
            prompt_token_ids=[100 * index + i for i in range(num_prompt)],
            output_token_ids=[100 * index + 50 + i for i in range(num_output)],
            sampling=SamplingParams(num_prompt_logprobs=draw(st.sampled_from([-1, 0]))),
            block_table=list(range(next_block, next_block + num_blocks)),
            num_computed_tokens=computed,
        )
        next_block += num_blocks
        scheduled.append(ScheduledRequest(request, draw(st.integers(1, num_tokens - computed))))
    return scheduled


@given(scheduled_requests())
@settings(max_examples=60, deadline=None)
def test_rows_match_a_plain_computation(scheduled: list[ScheduledRequest]) -> None:
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    cu_seqlens = [0]
    for item in scheduled:
        request = item.request
        tokens = request.prompt_token_ids + request.output_token_ids
        for position in range(item.start, item.end):
            next_is_prompt = position + 1 < request.num_prompt_tokens
            if (next_is_prompt and request.sampling.num_prompt_logprobs >= 0) or (
                position == len(tokens) - 1
            ):
                rows.append(len(input_ids))
            input_ids.append(tokens[position])
            positions.append(position)
            block_id = request.block_table[position // BLOCK_SIZE]
            slots.append(block_id * BLOCK_SIZE + position % BLOCK_SIZE)
        cu_seqlens.append(len(input_ids))
    batch = build_forward_batch(scheduled, BLOCK_SIZE)
    assert batch.input_ids.tolist() == input_ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.cu_seqlens_q.tolist() == cu_seqlens
    assert batch.seq_lens.tolist() == [item.end for item in scheduled]
    assert batch.logits_indices.tolist() == rows
    assert batch.max_seqlen_q == max(item.num_scheduled_tokens for item in scheduled)
    assert (batch.num_tokens, batch.num_seqs) == (len(input_ids), len(scheduled))


@given(scheduled_requests())
@settings(max_examples=30, deadline=None)
def test_block_tables_are_trimmed_and_padded_with_block_zero(
    scheduled: list[ScheduledRequest],
) -> None:
    batch = build_forward_batch(scheduled, BLOCK_SIZE)
    counts = [num_blocks_for(item.end, BLOCK_SIZE) for item in scheduled]
    assert batch.block_tables.shape == (len(scheduled), max(counts))
    for row, item, count in zip(batch.block_tables.tolist(), scheduled, counts, strict=True):
        assert row[:count] == item.request.block_table[:count]
        assert not any(row[count:])


def test_dtypes_are_those_of_the_kernels() -> None:
    batch = ForwardBatch.dummy()
    for tensor in (batch.input_ids, batch.positions, batch.slot_mapping, batch.logits_indices):
        assert tensor.dtype == torch.int64
    for tensor in (batch.cu_seqlens_q, batch.seq_lens, batch.block_tables):
        assert tensor.dtype == torch.int32


def test_the_dummy_batch_is_one_token_in_block_zero() -> None:
    batch = ForwardBatch.dummy()
    assert batch.num_tokens == 1
    assert batch.slot_mapping.tolist() == [0]
    assert batch.seq_lens.tolist() == [1]
    assert batch.block_tables.tolist() == [[0]]
    assert batch.logits_indices.tolist() == []
    assert batch.num_rows is not None
    assert batch.num_rows.tolist() == [0], "and nobody's"
