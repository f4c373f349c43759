"""Masks on logits: against bits that are read one by one, and through the samplers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.host_copy import HostCopies, host_tensor
from engine.sampling.inputs import SamplingInput
from engine.sampling.sampler import Sampler
from engine.sampling.token_mask import MASKED, TokenMask, mask_tokens
from tests.engine.sampling.test_sampler import make_logits, sampling_inputs


def make_mask(num_rows: int, vocab_size: int, seed: int) -> TokenMask:
    """Random rows and bits, at least one in each."""
    generator = np.random.default_rng(seed)
    rows = np.flatnonzero(generator.random(num_rows) < 0.7).astype(np.int64)
    words = generator.integers(
        -(2**31), 2**31, size=(len(rows), -(-vocab_size // 32)), dtype=np.int64
    ).astype(np.int32)
    for place in range(len(rows)):
        token = int(generator.integers(vocab_size))
        words.view(np.uint32)[place, token // 32] |= np.uint32(1 << token % 32)
    on_host = host_tensor(words.shape, torch.int32, torch.device("cpu"))
    return TokenMask(rows=rows, words=on_host.copy_(torch.from_numpy(words)))


def is_allowed(mask: TokenMask, row: int, token_id: int) -> bool:
    """The definition."""
    if row not in mask.rows:
        return True
    place = list(mask.rows).index(row)
    return bool((int(mask.words[place, token_id // 32]) >> token_id % 32) & 1)


@given(st.integers(1, 5), st.integers(1, 100), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_masked_are_the_tokens_whose_bits_are_cleared(
    num_rows: int, vocab_size: int, seed: int
) -> None:
    mask = make_mask(num_rows, vocab_size, seed)
    logits = make_logits(num_rows, seed, vocab_size)
    expected = [
        [
            value if is_allowed(mask, row, token_id) else MASKED
            for token_id, value in enumerate(values)
        ]
        for row, values in enumerate(logits.tolist())
    ]
    mask_tokens(logits, mask)
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=0, atol=0)


def test_more_rows_than_are_unpacked_at_a_time_are_all_masked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = make_logits(7, 1, 40)
    mask = make_mask(7, 40, 3)
    at_once = logits.clone()
    mask_tokens(at_once, mask)
    monkeypatch.setattr("engine.sampling.token_mask.ROWS_AT_A_TIME", 2)
    mask_tokens(logits, mask)
    torch.testing.assert_close(logits, at_once, rtol=0, atol=0)


@given(st.lists(sampling_inputs(), min_size=1, max_size=4), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_a_masked_row_is_sampled_as_if_the_other_tokens_were_hopeless(
    inputs: list[SamplingInput], seed: int
) -> None:
    """Minimum lengths aside, which may rule out what is left."""
    inputs = [
        dataclasses.replace(item, params=dataclasses.replace(item.params, min_tokens=0))
        for item in inputs
    ]
    logits = make_logits(len(inputs), seed)
    mask = make_mask(len(inputs), logits.shape[1], seed)
    hopeless = logits.clone()
    for row in range(len(inputs)):
        for token_id in range(logits.shape[1]):
            if not is_allowed(mask, row, token_id):
                hopeless[row, token_id] = -1e4
    sampler = Sampler(logits.shape[1])
    copies = HostCopies(logits.device)
    masked = sampler.launch(logits.clone(), inputs, copies, mask=mask).collect()
    plain = sampler.sample(hopeless, inputs)
    assert [token.token_id for token in masked] == [token.token_id for token in plain]
    for row, token in enumerate(masked):
        assert is_allowed(mask, row, token.token_id)
    # What is told of them is the model's own word.
    raw = sampler.sample(logits, inputs)
    for token, of_raw, item in zip(masked, raw, inputs, strict=True):
        if item.params.num_logprobs > 0:
            assert token.logprobs is not None
            assert of_raw.logprobs is not None
            assert token.logprobs.top_ids == of_raw.logprobs.top_ids
