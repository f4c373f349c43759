"""Sampling with fixed shapes chooses, token by token, what the sampler of lists chooses."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.sampling.graph_sampler import MAX_EDITS, GraphSampler, SamplingRows, SamplingStage
from engine.sampling.inputs import SamplingInput
from engine.sampling.noise import gumbel, mix_seed, row_key, row_keys
from engine.sampling.sampler import Sampler
from runtime.sampling import SamplingParams

VOCAB, PADDING = 60, 4
SEEDS = st.integers(0, 2**64 - 1)
TOKENS = st.integers(0, VOCAB - 1)
KINDS = ["normal", "flat", "tied", "equal", "peaked"]


@dataclass
class Running:
    """A request in a slot, and what it has sampled."""

    params: SamplingParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)


def params_of() -> st.SearchStrategy[SamplingParams]:
    """Draw params in which every feature is off about as often as it is on."""
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.0, 1e-40, 0.3, 1.0, 1.7]),
        top_p=st.sampled_from([1.0, 1.0, 0.0, 1e-6, 0.3, 0.5, 0.9, 0.999, 1.0 - 2.0**-24]),
        top_k=st.sampled_from([0, 0, 1, 3, 20, VOCAB, VOCAB + 5]),
        min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.4]),
        presence_penalty=st.sampled_from([0.0, 0.0, -0.5, 1.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, -0.3, 0.8]),
        logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.0, 2.0, 100.0]), max_size=3),
        seed=SEEDS,
        min_tokens=st.integers(0, 4),
        stop_token_ids=st.sets(st.integers(0, VOCAB + 9), max_size=4).map(tuple),
        max_tokens=st.just(100),
    )


def rows_of(running: Sequence[tuple[int, Running]], num_slots: int, size: int) -> SamplingRows:
    """Return the columns of a batch of `size` rows, the last ones padding."""
    padding = (num_slots, Running(SamplingParams(temperature=0.0), [0]))
    full = [*running, *[padding] * (size - len(running))]
    params = [item.params for _, item in full]

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    return SamplingRows(
        slot=integers([slot for slot, _ in full]),
        output_index=integers([len(item.output) for _, item in full]),
        mixed_seed=integers([mix_seed(item.seed) for item in params]),
        top_k=integers([min(item.top_k or VOCAB, VOCAB) for item in params]),
        temperature=torch.tensor([item.temperature for item in params]),
        top_p=torch.tensor([item.top_p for item in params]),
        min_p=torch.tensor([item.min_p for item in params]),
        repetition=torch.tensor([item.repetition_penalty for item in params]),
        frequency=torch.tensor([item.frequency_penalty for item in params]),
        presence=torch.tensor([item.presence_penalty for item in params]),
    )


def make_logits(kind: str, generator: torch.Generator) -> Tensor:
    """Return [6, VOCAB + PADDING]."""
    logits = torch.randn(6, VOCAB + PADDING, generator=generator) * 3
    match kind:
        case "flat":
            return logits * 0.03
        case "tied":
            return logits.round()
        case "equal":
            return torch.full_like(logits, 2.5)
        case "peaked":
            logits[:, VOCAB // 2] = 30.0
    return logits


def stage_of(running: Sequence[tuple[int, Running]]) -> SamplingStage:
    is_full = any(SamplingStage.of(item.params) is SamplingStage.FULL for _, item in running)
    return SamplingStage.FULL if is_full else SamplingStage.GREEDY


def expected_tokens(logits: Tensor, running: Sequence[tuple[int, Running]]) -> list[int]:
    inputs = [SamplingInput(item.params, item.prompt, item.output) for _, item in running]
    sampled = Sampler(VOCAB).sample(logits[: len(running)], inputs)
    return [token.token_id for token in sampled]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31), kind=st.sampled_from(KINDS))
def test_it_chooses_what_the_sampler_chooses(data: st.DataObject, seed: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    sampler = GraphSampler(VOCAB, 4, "cpu")
    slots: dict[int, Running] = {}
    for _ in range(6):
        # Requests come and go, in any slot, and rows change places.
        for slot in range(4):
            if data.draw(st.integers(0, 3)) == 0:
                prompt = data.draw(st.lists(TOKENS, min_size=1, max_size=9))
                output = data.draw(st.lists(TOKENS, max_size=3))
                slots[slot] = Running(data.draw(params_of()), prompt, output)
                sampler.assign(slot, slots[slot].params, prompt, output)
        batch = data.draw(st.permutations(sorted(slots.items(), key=lambda pair: pair[0])))
        logits = make_logits(kind, generator)
        expected = expected_tokens(logits, batch)
        rows = rows_of(batch, sampler.num_slots, 6)
        chosen = sampler.choose(logits.clone(), rows, stage_of(batch)).tolist()
        assert chosen[: len(batch)] == expected
        assert all(0 <= token < VOCAB for token in chosen)
        for (_, item), token in zip(batch, expected, strict=True):
            item.output.append(token)


def test_a_token_that_only_the_device_knows_is_counted() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, repetition_penalty=1.5)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    told, untold = GraphSampler(VOCAB, 1, "cpu"), GraphSampler(VOCAB, 1, "cpu")
    best = int(logits.argmax())
    told.assign(0, params, [1], [5, best])
    untold.assign(0, params, [1], [5], unread=(torch.tensor([best]), torch.tensor([1])))
    item = Running(params, [1], [5, best])
    tokens = [
        sampler.choose(logits.clone(), rows_of([(0, item)], 1, 1), SamplingStage.FULL).item()
        for sampler in (told, untold)
    ]
    assert tokens[0] == tokens[1] == expected_tokens(logits, [(0, item)])[0]
    assert tokens[0] != best


def test_the_edits_of_an_earlier_owner_are_gone() -> None:
    sampler = GraphSampler(VOCAB, 1, "cpu")
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 1.0
    for params, token in (
        (SamplingParams(temperature=0.0, logit_bias={3: 50.0}), 3),
        (SamplingParams(temperature=0.0), 7),
    ):
        sampler.assign(0, params, [1], [])
        rows = rows_of([(0, Running(params, [1]))], 1, 1)
        assert sampler.choose(logits.clone(), rows, SamplingStage.GREEDY).item() == token


def test_unusable_logits_spoil_no_other_row() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
    sampler = GraphSampler(VOCAB, 3, "cpu")
    running = [(slot, Running(params, [slot])) for slot in range(3)]
    logits = torch.randn(3, VOCAB)
    expected = expected_tokens(logits, running)
    logits[0, 4], logits[1] = float("nan"), float("inf")
    tokens = sampler.choose(logits, rows_of(running, 3, 3), SamplingStage.FULL).tolist()
    assert tokens[2] == expected[2]
    assert all(0 <= token < VOCAB for token in tokens)


def test_more_edits_than_the_table_holds_are_refused() -> None:
    bias = dict.fromkeys(range(MAX_EDITS), 1.0)
    assert GraphSampler.takes(SamplingParams(logit_bias=bias, stop_token_ids=(1,)))
    assert not GraphSampler.takes(
        SamplingParams(logit_bias=bias, stop_token_ids=(1,), min_tokens=1)
    )


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_keys_made_on_the_device_are_those_made_on_the_host(seed: int) -> None:
    indices = torch.tensor([0, 1, 77, 2**40])
    keys = row_keys(torch.full_like(indices, mix_seed(seed)), indices)
    expected = [row_key(seed, index) for index in indices.tolist()]
    assert keys.tolist() == expected
    assert torch.equal(gumbel(keys, 9, "cpu"), gumbel(expected, 9, "cpu"))
