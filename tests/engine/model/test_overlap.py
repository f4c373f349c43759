"""A step as two micro-batches gives what it gives as one, on one rank and wherever it is cut."""

from pathlib import Path

import pytest
import torch

from engine.boot.build import build_kv_pool, build_model
from engine.execution import Execution
from engine.memory.kv_pool import KVPool
from engine.micro_batches import OverlapRule
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from tests.engine.parallel.layouts import make_step
from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=1)


@torch.inference_mode()
def run_step(
    model: DeepseekV3ForCausalLM, lengths: list[int], before: list[int]
) -> tuple[torch.Tensor, KVPool]:
    """Run the prefixes as one step and the rest as another."""
    pool = build_kv_pool(model, 64, block_size=8)
    pool.data.fill_(float("nan"))
    pool.data[0] = 0.0
    if any(before):
        model(make_step(before, [0] * len(before)), pool)
    return model(make_step(lengths, before), pool), pool


@pytest.mark.parametrize(
    ("lengths", "before"),
    [
        ([41], [0]),
        ([40], [13]),
        ([9, 9], [0, 0]),
        ([3, 50, 2], [5, 0, 8]),
        ([1, 1, 1, 1], [7, 9, 20, 1]),
        ([1], [6]),
    ],
)
@pytest.mark.parametrize("lag", [0, 1, 3, 100])
def test_same_states_and_latents(
    checkpoint: Path, lengths: list[int], before: list[int], lag: int
) -> None:
    serial = build_model(checkpoint)
    overlapped = build_model(
        checkpoint, execution=Execution(overlap=OverlapRule(min_tokens=0, lag=lag))
    )
    expected, expected_pool = run_step(serial, lengths, before)
    actual, actual_pool = run_step(overlapped, lengths, before)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    ours, theirs = (pool.data[1:] for pool in (actual_pool, expected_pool))  # 0: padding's
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("lag", [0, 2, 50])
def test_a_layer_is_done_when_both_have_written_it(checkpoint: Path, lag: int) -> None:
    model = build_model(checkpoint, execution=Execution(overlap=OverlapRule(min_tokens=2, lag=lag)))
    step, pool = make_step([30, 11], [0, 0]), build_kv_pool(model, 64, block_size=8)
    seen: list[tuple[int, bool]] = []

    def note(layer: int) -> None:
        rows = pool.layer(layer)[step.slot_mapping // 8, step.slot_mapping % 8]
        seen.append((layer, bool(rows.any(dim=1).all())))

    model(step, pool, on_layer_done=note)
    assert seen == [(0, True), (1, True), (2, True)]


def test_small_steps_run_as_one(checkpoint: Path) -> None:
    model = build_model(checkpoint, execution=Execution(overlap=OverlapRule(min_tokens=12)))
    calls: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda _, ids, __: calls.append(len(ids[0])))
    pool = build_kv_pool(model, 64, block_size=8)
    model(make_step([11], [0]), pool)
    model(make_step([12], [0]), pool)
    assert calls == [11, 6, 6]


def test_the_shared_expert_may_run_before_or_after_the_arrival(checkpoint: Path) -> None:
    during = build_model(checkpoint)
    after = build_model(checkpoint, execution=Execution(overlap_shared_expert=False))
    expected, _ = run_step(during, [9, 9], [0, 4])
    actual, _ = run_step(after, [9, 9], [0, 4])
    assert torch.equal(actual, expected)
