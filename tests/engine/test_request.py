"""Requests: derived counts, tokens across prompt and output, hashes, and when they end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Request, ScheduledRequest, num_blocks_for
from runtime.block_hash import hash_blocks
from runtime.sampling import FinishReason, SamplingParams


def make_request(
    prompt: list[int], output: list[int] | None = None, sampling: SamplingParams | None = None
) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=prompt,
        output_token_ids=output or [],
        sampling=sampling or SamplingParams(),
    )


@given(st.integers(1, 9), st.integers(0, 9), st.data())
def test_token_ids_span_prompt_and_output(
    num_prompt: int, num_output: int, data: st.DataObject
) -> None:
    tokens = list(range(num_prompt + num_output))
    request = make_request(tokens[:num_prompt], tokens[num_prompt:])
    start = data.draw(st.integers(0, len(tokens)))
    end = data.draw(st.integers(start, len(tokens)))
    assert request.token_ids(start, end) == tokens[start:end]


@given(st.integers(1, 20), st.lists(st.integers(1, 5), max_size=6), st.integers(1, 5))
def test_hashes_grow_with_the_output(num_prompt: int, growth: list[int], block_size: int) -> None:
    request = make_request(list(range(num_prompt)))
    request.cache_salt = "tenant"
    for count in growth:
        request.output_token_ids += range(count)
        tokens = request.token_ids(0, request.num_tokens)
        expected = hash_blocks(tokens, block_size, salt="tenant")
        assert request.update_block_hashes(block_size) == expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_num_blocks_for(num_tokens: int, expected: int) -> None:
    assert num_blocks_for(num_tokens, 4) == expected


def test_blocks_needed_counts_what_the_table_lacks() -> None:
    request = make_request(list(range(10)))
    assert request.num_blocks_needed(10, 4) == 3
    request.block_table, request.num_computed_tokens = [1, 2], 4
    assert request.num_blocks_needed(4, 4) == 0
    assert request.num_blocks_needed(5, 4) == 1


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_token_ids is empty"):
        make_request([])


def test_a_step_samples_when_it_reaches_the_last_token() -> None:
    request = make_request([1, 2, 3, 4])
    assert not ScheduledRequest(request, 3).samples
    assert ScheduledRequest(request, 4).samples
    request.num_computed_tokens = 4
    request.output_token_ids = [5]
    step = ScheduledRequest(request, 1)
    assert (step.start, step.end, step.samples) == (4, 5, True)


def test_scheduling_more_tokens_than_there_are_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        ScheduledRequest(make_request([1, 2]), 3)


@pytest.mark.parametrize(
    ("output", "max_model_len", "expected"),
    [
        ([], 100, None),
        ([5], 100, None),
        ([5, 9], 100, FinishReason.STOP),
        ([5, 6, 7], 100, FinishReason.LENGTH),
        ([5, 6, 9], 100, FinishReason.STOP),
        ([5, 6], 4, FinishReason.LENGTH),
    ],
)
def test_finish_reason(
    output: list[int], max_model_len: int, expected: FinishReason | None
) -> None:
    sampling = SamplingParams(max_tokens=3, stop_token_ids=(9,))
    assert make_request([1, 2], output, sampling).finish_reason(max_model_len) == expected


def test_the_context_is_what_was_known_at_first() -> None:
    request = make_request([1, 2, 3], [4, 5])
    request.output_token_ids += [6, 7]
    assert (request.num_context_tokens, request.num_tokens) == (5, 7)
