"""The sampler: against a plain reference, against its own distribution, and in any company."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.inputs import SamplingInput
from engine.sampling.penalties import apply_adjustments
from engine.sampling.sampler import Sampler
from engine.sampling.truncation import apply_min_p, apply_top_k_top_p
from runtime.sampling import SamplingParams
from tests.engine.sampling.reference import adjusted_logits, distribution, kept_tokens

VOCAB = 12
tokens = st.integers(0, VOCAB - 1)


@st.composite
def sampling_inputs(draw: st.DrawFn, *, greedy: bool | None = None) -> SamplingInput:
    """A request with any mix of settings."""
    if greedy is None:
        greedy = draw(st.booleans())
    params = SamplingParams(
        temperature=0.0 if greedy else draw(st.sampled_from([0.3, 1.0, 1.7])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5, 0.01])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, VOCAB, 1000])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.4])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        logit_bias=draw(st.dictionaries(tokens, st.floats(-5, 5), max_size=3)),
        seed=draw(st.integers(0, 2**64 - 1)),
        min_tokens=draw(st.integers(0, 4)),
        stop_token_ids=tuple(draw(st.sets(tokens, max_size=2))),
        num_logprobs=draw(st.integers(-1, 3)),
    )
    prompt = draw(st.lists(tokens, min_size=1, max_size=6))
    return SamplingInput(params, prompt, draw(st.lists(tokens, max_size=6)))


def make_logits(num_rows: int, seed: int, vocab_size: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 2


@given(st.lists(sampling_inputs(), min_size=1, max_size=4), st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_adjustments_match_the_reference(inputs: list[SamplingInput], seed: int) -> None:
    logits = make_logits(len(inputs), seed)
    expected = [
        adjusted_logits(row, item) for row, item in zip(logits.tolist(), inputs, strict=True)
    ]
    apply_adjustments(logits, inputs)
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@given(st.lists(sampling_inputs(greedy=False), min_size=1, max_size=4), st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_truncation_matches_the_reference(inputs: list[SamplingInput], seed: int) -> None:
    logits = make_logits(len(inputs), seed)
    params = [item.params for item in inputs]
    temperatures = torch.tensor([item.temperature for item in params])
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperatures[:, None]
    apply_min_p(scaled, params)
    apply_top_k_top_p(scaled, params)
    for row, item in enumerate(inputs):
        kept = set(torch.isfinite(scaled[row]).nonzero()[:, 0].tolist())
        assert kept == kept_tokens(logits[row].tolist(), item)


@given(st.lists(sampling_inputs(), min_size=1, max_size=5), st.integers(0, 1000), st.data())
@settings(max_examples=80, deadline=None)
def test_a_token_does_not_depend_on_its_company(
    inputs: list[SamplingInput], seed: int, data: st.DataObject
) -> None:
    logits = make_logits(len(inputs), seed)
    sampler = Sampler(VOCAB)
    together = sampler.sample(logits, inputs)
    order = data.draw(st.permutations(range(len(inputs))))
    shuffled = sampler.sample(logits[order], [inputs[row] for row in order])
    for place, row in enumerate(order):
        alone = sampler.sample(logits[row : row + 1], [inputs[row]])[0]
        assert alone.token_id == together[row].token_id == shuffled[place].token_id


@given(st.lists(sampling_inputs(greedy=True), min_size=1, max_size=4), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_greedy_takes_the_best_adjusted_logit(inputs: list[SamplingInput], seed: int) -> None:
    logits = make_logits(len(inputs), seed)
    before = logits.clone()
    sampled = Sampler(VOCAB).sample(logits, inputs)
    assert torch.equal(logits, before)
    for row, item in enumerate(inputs):
        adjusted = adjusted_logits(logits[row].tolist(), item)
        assert adjusted[sampled[row].token_id] == pytest.approx(max(adjusted), abs=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.5, top_k=6, top_p=0.8, min_p=0.02),
        SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3),
    ],
    ids=["plain", "cool", "top_k", "top_p", "min_p", "all", "penalties"],
)
def test_empirical_distribution_is_the_softmax(params: SamplingParams) -> None:
    num_draws = 20_000
    logits = make_logits(1, seed=5) * 0.4
    inputs = [
        SamplingInput(dataclasses.replace(params, seed=seed), [1, 2], [2, 3, 3])
        for seed in range(num_draws)
    ]
    sampled = Sampler(VOCAB).sample(logits.expand(num_draws, VOCAB), inputs)
    counts = torch.bincount(torch.tensor([s.token_id for s in sampled]), minlength=VOCAB)
    expected = torch.tensor(distribution(logits[0].tolist(), inputs[0])) * num_draws
    assert not counts[expected == 0].any()
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    assert freedom > 0
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_successive_tokens_are_drawn_independently() -> None:
    logits = torch.zeros(1, 4)
    sampler = Sampler(4)
    num_draws = 8000
    inputs = [
        SamplingInput(SamplingParams(seed=seed), [0], [0] * index)
        for seed in range(num_draws)
        for index in range(2)
    ]
    drawn = [s.token_id for s in sampler.sample(logits.expand(len(inputs), 4), inputs)]
    pairs = torch.tensor([4 * a + b for a, b in zip(drawn[::2], drawn[1::2], strict=True)])
    expected = num_draws / 16
    chi_square = ((torch.bincount(pairs, minlength=16) - expected) ** 2 / expected).sum().item()
    assert chi_square < 15 + 5 * math.sqrt(2 * 15)


def test_ties_are_kept_together() -> None:
    scaled = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]])
    apply_top_k_top_p(scaled, [SamplingParams(top_k=2)])
    assert torch.isfinite(scaled)[0].tolist() == [True, True, True, True, False]


def test_extreme_settings_stay_finite() -> None:
    logits = torch.tensor([[80.0, -80.0, 79.0]])
    for params in (
        SamplingParams(temperature=1e-40),
        SamplingParams(top_p=0.0),
        SamplingParams(min_p=1.0),
        SamplingParams(top_k=1, temperature=100.0),
    ):
        assert Sampler(3).sample(logits, [SamplingInput(params, [0], [])])[0].token_id == 0


def test_padding_columns_are_never_sampled() -> None:
    logits = torch.cat((torch.zeros(1, 3), torch.full((1, 5), 50.0)), dim=1)
    inputs = [SamplingInput(SamplingParams(temperature=0.0, num_logprobs=20), [0], [])]
    sampled = Sampler(3).sample(logits, inputs)[0]
    assert sampled.token_id < 3
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(math.log(1 / 3))
    assert sorted(sampled.logprobs.top_ids) == [0, 1, 2]


def test_min_tokens_masks_stop_tokens_only_while_short() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(1, 999))
    tokens = [
        Sampler(3).sample(logits, [SamplingInput(params, [0], [0] * count)])[0].token_id
        for count in range(4)
    ]
    assert tokens == [2, 2, 1, 1]


def test_no_rows_give_no_tokens() -> None:
    assert Sampler(3).sample(torch.zeros(0, 3), []) == []
