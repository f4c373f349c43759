"""The fused sampling kernel chooses what the plain operations choose, in a graph as well."""

import random
from dataclasses import fields

import pytest
import torch

from engine.sampling.graph_sampler import GraphSampler, SamplingRows, SamplingStage
from engine.sampling.noise import mix_seed

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def draw_rows(seed: int, num_rows: int, vocab_size: int) -> SamplingRows:
    draw = random.Random(seed)

    def floats(*choices: float) -> torch.Tensor:
        return torch.tensor([draw.choice(choices) for _ in range(num_rows)], device="cuda")

    return SamplingRows(
        slot=torch.randperm(num_rows, device="cuda"),
        output_index=torch.randint(0, 99, (num_rows,), device="cuda"),
        mixed_seed=torch.tensor([mix_seed(draw.getrandbits(64)) for _ in range(num_rows)]).cuda(),
        top_k=floats(vocab_size, vocab_size, 1, 50, vocab_size - 1).long(),
        temperature=floats(0.0, 0.3, 0.6, 1.0, 1.7, 1e-40),
        top_p=floats(1.0, 0.0, 0.5, 0.95, 0.999),
        min_p=floats(0.0, 0.0, 0.05, 1.0),
        repetition=floats(1.0, 1.0, 0.7, 1.4),
        frequency=floats(0.0, 0.0, -0.3, 0.8),
        presence=floats(0.0, 0.0, 1.5),
    )


def make_sampler(vocab_size: int, num_rows: int) -> GraphSampler:
    sampler = GraphSampler(vocab_size, num_rows, "cuda")
    shape = sampler._seen.shape
    seen = torch.randint(0, 7, shape, dtype=torch.int32, device="cuda")
    sampler._seen.copy_(seen * (torch.rand(shape, device="cuda") < 0.05))
    return sampler


def twin_of(sampler: GraphSampler) -> GraphSampler:
    """Return the same tables with the plain operations."""
    twin = GraphSampler(sampler.vocab_size, sampler.num_slots, "cuda")
    twin._seen.copy_(sampler._seen)
    twin._choose_fused = None
    return twin


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.mark.parametrize("vocab_size", [33, 4096, 129280])
@pytest.mark.parametrize("sharpness", [0.5, 3.0, 12.0])
@pytest.mark.parametrize("coarse", [False, True])
def test_tokens_are_those_of_the_plain_operations(
    vocab_size: int, sharpness: float, coarse: bool
) -> None:
    torch.manual_seed(0)
    num_rows = 64
    wrong = 0
    for seed in range(4):
        fused = make_sampler(vocab_size, num_rows)
        plain = twin_of(fused)
        rows = draw_rows(seed, num_rows, vocab_size)
        logits = torch.randn(num_rows, vocab_size + 7, device="cuda") * sharpness
        logits = logits.bfloat16().float() if coarse else logits
        actual = fused.choose(logits.clone(), rows, SamplingStage.FULL)
        expected = plain.choose(logits.clone(), rows, SamplingStage.FULL)
        assert int(actual.min()) >= 0
        assert int(actual.max()) < vocab_size
        wrong += int((actual != expected).sum())
    # Logarithms may differ in the last bit, and two sums be closer than that.
    assert wrong <= 1


def test_unusable_rows_give_some_token() -> None:
    sampler = make_sampler(129280, 3)
    rows = draw_rows(0, 3, 129280)
    logits = torch.randn(3, 129280, device="cuda")
    logits[0, 5], logits[1], logits[2] = float("nan"), float("inf"), float("nan")
    tokens = sampler.choose(logits, rows, SamplingStage.FULL)
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < 129280


def test_a_captured_step_follows_its_inputs() -> None:
    sampler = make_sampler(4096, 32)
    plain = twin_of(sampler)
    source = torch.randn(32, 4096, device="cuda")
    rows = draw_rows(0, 32, 4096)
    sampler.choose(source.clone(), rows, SamplingStage.FULL)
    sampler._seen.copy_(plain._seen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampler.choose(source.clone(), rows, SamplingStage.FULL)
    for seed in range(1, 4):
        source.normal_(std=4.0)
        following = draw_rows(seed, 32, 4096)
        for field in fields(SamplingRows):
            getattr(rows, field.name).copy_(getattr(following, field.name))
        graph.replay()
        expected = plain.choose(source.clone(), rows, SamplingStage.FULL)
        assert torch.equal(captured, expected)
        assert torch.equal(sampler._seen, plain._seen)
