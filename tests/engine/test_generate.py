"""The oracle loop itself: stops, lengths, seeds, logprobs, on a fake model."""

import dataclasses

import pytest

from engine.generate import generate
from runtime.errors import InvalidRequestError
from runtime.sampling import FinishReason, SamplingParams
from tests.engine.fake_model import FakeModel, make_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]


def test_batch_size_does_not_change_tokens() -> None:
    params = [dataclasses.replace(GREEDY, temperature=t, seed=9) for t in (0.0, 1.0, 0.7, 0.0)]
    alone = generate(FakeModel(), PROMPTS, params, batch_size=1, block_size=2)
    together = generate(FakeModel(), PROMPTS, params, batch_size=3)
    assert [o.token_ids for o in alone] == [o.token_ids for o in together]
    assert all(len(o.token_ids) == 6 for o in alone)


def test_seeds_choose_the_tokens() -> None:
    def tokens(seed: int) -> list[int]:
        params = SamplingParams(temperature=2.0, seed=seed, max_tokens=12)
        return generate(FakeModel(), PROMPTS[:1], params)[0].token_ids

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_a_stop_token_ends_the_output_and_is_part_of_it() -> None:
    free = generate(FakeModel(), PROMPTS[:1], GREEDY)[0]
    stop = free.token_ids[2]
    params = dataclasses.replace(GREEDY, stop_token_ids=(stop,))
    output = generate(FakeModel(), PROMPTS[:1], params)[0]
    assert output.finish_reason is FinishReason.STOP
    assert output.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    longer = dataclasses.replace(params, min_tokens=6)
    output = generate(FakeModel(), PROMPTS[:1], longer)[0]
    assert stop not in output.token_ids
    assert output.finish_reason is FinishReason.LENGTH


def test_the_context_length_ends_the_output() -> None:
    model = FakeModel(make_config(max_position_embeddings=8))
    params = dataclasses.replace(GREEDY, max_tokens=100)
    output = generate(model, [[1, 2, 3]], params, block_size=4)[0]
    assert len(output.token_ids) == 5
    assert output.finish_reason is FinishReason.LENGTH


def test_logprobs_of_prompt_and_output() -> None:
    params = dataclasses.replace(GREEDY, num_logprobs=1, num_prompt_logprobs=2)
    output = generate(FakeModel(), PROMPTS[2:3], params)[0]
    assert len(output.prompt_logprobs) == 4
    assert [len(entry.top_ids) for entry in output.prompt_logprobs] == [2] * 4
    assert [entry.top_ids for entry in output.logprobs] == [(t,) for t in output.token_ids]


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        generate(FakeModel(), [[]], GREEDY)
    with pytest.raises(ValueError, match="64 tokens"):
        generate(FakeModel(), [[1] * 64], GREEDY)
    with pytest.raises(ValueError, match="1 sampling params for 2 prompts"):
        generate(FakeModel(), PROMPTS[:2], [GREEDY])
    with pytest.raises(InvalidRequestError, match="token id 50"):
        generate(FakeModel(), [[50]], GREEDY)
