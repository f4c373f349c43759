"""The fused sampling kernel chooses what the plain operations choose, in a graph as well.

The tests that capture nothing also run on a CPU in Triton's interpreter, on smaller shapes:
TRITON_INTERPRET=1 pytest -m gpu.
"""

import importlib
import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from engine.sampling.graph_sampler import MAX_EDITS, GraphSampler, SamplingRows, SamplingStage
from engine.sampling.noise import mix_seed
from tests.engine.triton_device import DEVICE, IS_INTERPRETED, skip_without_device

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

NUM_ROWS = 5 if IS_INTERPRETED else 160
WIDE = 11200 if IS_INTERPRETED else 129280
"""More tokens than are set apart, and than there are lanes; and so is three quarters of it."""


def draw_rows(seed: int, num_rows: int, vocab_size: int) -> SamplingRows:
    draw = random.Random(seed)

    def floats(*choices: float) -> Tensor:
        return torch.tensor([draw.choice(choices) for _ in range(num_rows)], device=DEVICE)

    seeds = [mix_seed(draw.getrandbits(64)) for _ in range(num_rows)]
    off = vocab_size
    return SamplingRows(
        slot=torch.randperm(num_rows, device=DEVICE),
        output_index=torch.randint(0, 99, (num_rows,), device=DEVICE),
        mixed_seed=torch.tensor(seeds, device=DEVICE),
        top_k=floats(off, off, off, 1, 50, 1000, vocab_size * 3 // 4, off - 1, off + 7).long(),
        temperature=floats(0.0, 0.3, 0.6, 0.6, 1.0, 1.0, 1.7, 1e-40),
        top_p=floats(1.0, 1.0, 0.0, 1e-4, 0.1, 0.5, 0.95, 0.95, 0.999, 1.0 - 2.0**-24),
        min_p=floats(0.0, 0.0, 0.0, 0.05, 0.9, 1.0),
        repetition=floats(1.0, 1.0, 0.7, 1.4),
        frequency=floats(0.0, 0.0, -0.3, 0.8),
        presence=floats(0.0, 0.0, 1.5),
    )


def changed(rows: SamplingRows, **values: float) -> SamplingRows:
    """Return a copy with some columns the same in every row."""
    columns = {field.name: getattr(rows, field.name).clone() for field in fields(rows)}
    for name, value in values.items():
        columns[name].fill_(value)
    return SamplingRows(**columns)


def make_sampler(vocab_size: int, num_rows: int) -> GraphSampler:
    sampler = GraphSampler(vocab_size, num_rows, DEVICE)
    if IS_INTERPRETED:
        module = importlib.import_module("engine.kernels.fused.sampling")
        sampler._choose_fused = module.choose_tokens
    shape = sampler._seen.shape
    seen = torch.randint(0, 7, shape, dtype=torch.int32, device=DEVICE)
    sampler._seen.copy_(seen * (torch.rand(shape, device=DEVICE) < 0.05))
    for slot in range(0, num_rows, 3):
        ids = torch.randint(0, vocab_size, (MAX_EDITS // 2,), device=DEVICE)
        sampler._edit_ids[slot, : len(ids)] = ids
        # What is added twice to one token must not depend on the order.
        sampler._edits[slot, : len(ids)] = 2.0
        sampler._edits[slot, : len(ids) // 8] = -torch.inf
        sampler._edit_ends[slot, : len(ids)] = torch.randint(0, 99, ids.shape, device=DEVICE)
        sampler._has_edits[slot] = True
    return sampler


def twin_of(sampler: GraphSampler) -> GraphSampler:
    """Return the same tables with the plain operations."""
    twin = GraphSampler(sampler.vocab_size, sampler.num_slots, DEVICE)
    for name in ("_seen", "_edit_ids", "_edits", "_edit_ends"):
        getattr(twin, name).copy_(getattr(sampler, name))
    twin._has_edits[:] = sampler._has_edits
    twin._choose_fused = None
    return twin


def make_logits(kind: str, num_rows: int, vocab_size: int) -> Tensor:
    """Return [num_rows, vocab_size + 7]; the last columns are padding, and large."""
    logits = torch.randn(num_rows, vocab_size + 7, device=DEVICE)
    match kind:
        case "flat":
            logits *= 0.5
        case "sharp":
            logits *= 12.0
        case "coarse":
            logits = (logits * 3.0).bfloat16().float()
        case "tied":
            logits = logits.round()
        case "equal":
            logits = torch.full_like(logits, -3.25)
        case "peaked":
            logits[:, vocab_size // 3] = 14.0
        case "banned":
            logits[:, ::2] = -torch.inf
    logits[:, vocab_size:] = 1e4
    return logits


def count_differences(kind: str, vocab_size: int, rows: SamplingRows) -> int:
    """Return how many rows get another token than with the plain operations."""
    num_rows = len(rows.slot)
    fused = make_sampler(vocab_size, num_rows)
    plain = twin_of(fused)
    logits = make_logits(kind, num_rows, vocab_size)
    actual = fused.choose(logits.clone(), rows, SamplingStage.FULL)
    expected = plain.choose(logits.clone(), rows, SamplingStage.FULL)
    assert int(actual.min()) >= 0
    assert int(actual.max()) < vocab_size
    is_same = actual == expected
    assert torch.equal(fused._seen[rows.slot[is_same]], plain._seen[rows.slot[is_same]])
    return int((~is_same).sum())


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    skip_without_device()
    torch.manual_seed(0)


@pytest.mark.parametrize("vocab_size", [33, WIDE] if IS_INTERPRETED else [33, 4096, WIDE])
@pytest.mark.parametrize(
    "kind", ["flat", "normal", "sharp", "coarse", "tied", "equal", "peaked", "banned"]
)
def test_tokens_are_those_of_the_plain_operations(vocab_size: int, kind: str) -> None:
    seeds = range(1 if IS_INTERPRETED else 2)
    wrong = sum(
        count_differences(kind, vocab_size, draw_rows(seed, NUM_ROWS, vocab_size)) for seed in seeds
    )
    # Logarithms may differ in the last bit, and two sums be closer than that.
    assert wrong <= 1


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.02])
@pytest.mark.parametrize("kind", ["flat", "coarse", "sharp"])
def test_a_nucleus_is_cut_where_the_plain_operations_cut_it(kind: str, top_p: float) -> None:
    rows = changed(
        draw_rows(3, NUM_ROWS, WIDE),
        top_k=WIDE, min_p=0.0, top_p=top_p, temperature=0.8,
    )  # fmt: skip
    assert count_differences(kind, WIDE, rows) == 0


@pytest.mark.parametrize("top_k", [1, 50, 3000, WIDE * 3 // 4])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_the_best_are_those_of_the_plain_operations(top_k: int, top_p: float) -> None:
    rows = changed(
        draw_rows(4, NUM_ROWS, WIDE),
        top_k=top_k, min_p=0.0, top_p=top_p, temperature=1.3,
    )  # fmt: skip
    for kind in ("tied", "normal"):
        if not IS_INTERPRETED or (kind == "tied") == (top_p == 1.0):
            assert count_differences(kind, WIDE, rows) == 0


def test_few_and_many_rows_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of another width read a row in another order."""
    many, few = 140, 10
    if IS_INTERPRETED:
        many, few = 12, 5
        monkeypatch.setattr("engine.kernels.fused.sampling.FEW_ROWS", few)
    # Without penalties, for which the first call would count.
    rows = changed(draw_rows(5, many, 2048), repetition=1.0, frequency=0.0, presence=0.0)
    logits = make_logits("normal", many, 2048)
    sampler = make_sampler(2048, many)
    together = sampler.choose(logits.clone(), rows, SamplingStage.FULL)
    last = SamplingRows(**{field.name: getattr(rows, field.name)[-few:] for field in fields(rows)})
    alone = sampler.choose(logits[-few:].clone(), last, SamplingStage.FULL)
    assert torch.equal(alone, together[-few:])


@pytest.mark.parametrize("kind", ["normal", "tied", "equal"])
def test_greedy_steps_take_the_first_of_the_best(kind: str) -> None:
    rows = draw_rows(6, 8, 4096)
    fused = make_sampler(4096, 8)
    plain = twin_of(fused)
    logits = make_logits(kind, 8, 4096)
    actual = fused.choose(logits.clone(), rows, SamplingStage.GREEDY)
    assert torch.equal(actual, plain.choose(logits.clone(), rows, SamplingStage.GREEDY))
    assert torch.equal(fused._seen, plain._seen)


def test_unusable_rows_give_some_token() -> None:
    sampler = make_sampler(WIDE, 4)
    logits = torch.randn(4, WIDE, device=DEVICE)
    logits[0, 5], logits[1], logits[2], logits[3] = float("nan"), torch.inf, torch.nan, -torch.inf
    for seed in range(4):
        rows = draw_rows(seed, 4, WIDE)
        tokens = sampler.choose(logits.clone(), rows, SamplingStage.FULL)
        assert int(tokens.min()) >= 0
        assert int(tokens.max()) < WIDE


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter captures nothing")
def test_a_captured_step_follows_its_inputs() -> None:
    sampler = make_sampler(4096, 32)
    plain = twin_of(sampler)
    source = torch.randn(32, 4096, device=DEVICE)
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
