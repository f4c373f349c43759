"""Log-probabilities: raw distribution, chosen token, best first."""

import math

import pytest
import torch

from engine.host_copy import HostCopies
from engine.sampling.inputs import SamplingInput, validate_request
from engine.sampling.logprobs import launch_logprobs, launch_prompt_logprobs
from engine.sampling.sampler import Sampler
from runtime.errors import InvalidRequestError
from runtime.sampling import SamplingParams

CPU = torch.device("cpu")
PROBABILITIES = [0.1, 0.2, 0.4, 0.3]


def make_logits(num_rows: int = 1) -> torch.Tensor:
    return torch.tensor(PROBABILITIES).log().expand(num_rows, 4) + 7.0


def test_logprobs_are_of_the_raw_distribution() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={0: 100.0}, num_logprobs=2)
    sampled = Sampler(4).sample(make_logits(), [SamplingInput(params, [0], [])])[0]
    assert sampled.token_id == 0
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(math.log(0.1), abs=1e-5)
    assert sampled.logprobs.top_ids == (2, 3)
    assert sampled.logprobs.top_logprobs == pytest.approx((math.log(0.4), math.log(0.3)), abs=1e-5)


def test_each_row_gets_what_it_asked_for() -> None:
    inputs = [
        SamplingInput(SamplingParams(temperature=0.0, num_logprobs=count), [0], [])
        for count in (-1, 0, 3)
    ]
    none, chosen, best = (s.logprobs for s in Sampler(4).sample(make_logits(3), inputs))
    assert none is None
    assert chosen is not None
    assert chosen.top_ids == chosen.top_logprobs == ()
    assert best is not None
    assert best.top_ids == (2, 3, 1)
    assert chosen.logprob == best.logprob == best.top_logprobs[0]


def test_more_than_the_vocabulary_gives_the_vocabulary() -> None:
    pending = launch_logprobs(make_logits(), torch.tensor([1]), [20], HostCopies(CPU))
    (logprobs,) = pending.collect()
    assert logprobs.top_ids == (2, 3, 1, 0)
    assert sum(math.exp(value) for value in logprobs.top_logprobs) == pytest.approx(1, abs=1e-5)


def test_prompt_logprobs_are_of_the_next_tokens() -> None:
    result = launch_prompt_logprobs(make_logits(3), [3, 0, 2], 1, HostCopies(CPU)).collect()
    assert [math.exp(r.logprob) for r in result] == pytest.approx([0.3, 0.1, 0.4], abs=1e-5)
    assert [r.top_ids for r in result] == [(2,)] * 3
    assert [r.rank for r in result] == [2, 4, 1]


def test_tokens_that_are_equally_likely_share_the_last_of_their_ranks() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]]).expand(4, 4)
    result = launch_prompt_logprobs(logits, [0, 1, 2, 3], 0, HostCopies(CPU)).collect()
    assert [r.rank for r in result] == [3, 2, 2, 4]


@pytest.mark.parametrize(
    ("prompt", "bias", "field"),
    [([0, 4], {}, "prompt has token id 4"), ([-1], {}, "prompt"), ([0], {4: 1.0}, "logit_bias")],
)
def test_unknown_token_ids_are_refused(
    prompt: list[int], bias: dict[int, float], field: str
) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        validate_request(prompt, SamplingParams(logit_bias=bias), 4)


def test_known_token_ids_pass() -> None:
    validate_request([0, 3], SamplingParams(logit_bias={3: 1.0}), 4)
