"""Steps are timed for every size and number of drafts, and leave nothing behind."""

from __future__ import annotations

import pytest
import torch

from decode.open_budget import open_budget
from engine.boot.build import build_kv_pool, build_model
from engine.draft_choices import DraftChoices
from engine.graphs.graph_runner import GraphRunner
from engine.graphs.step_graphs import StepGraphs
from engine.graphs.step_times import time_steps
from engine.options import EngineOptions, Switch, TokenSteps
from engine.parallel.groups import RankGroup
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from tests.engine.tiny import write_checkpoint

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    model = build_model(write_checkpoint(tmp_path_factory.mktemp("checkpoint")), with_mtp=True)
    pool = build_kv_pool(model, 6, block_size=BLOCK_SIZE)
    return ModelRunner(model, pool, Sampler(model.config.vocab_size))


@pytest.mark.parametrize("max_model_len", [2, 64])
def test_every_size_is_timed_with_the_drafts_that_it_may_have(
    runner: ModelRunner, max_model_len: int
) -> None:
    """Of whatever length contexts may be; only the dummy block is written."""
    pool, vocab_size = runner.kv_pool, runner.sampler.vocab_size
    graphs = StepGraphs(
        runner.model,
        pool,
        vocab_size=vocab_size,
        max_num_seqs=4,
        max_model_len=max_model_len,
        num_drafts=DraftChoices.up_to(2, max_rows=8),
    )
    graphs.capture()
    layers = [pool.layer(index) for index in range(pool.num_layers)]
    for layer in layers:
        layer.fill_(3.0)
    costs = time_steps(
        graphs,
        vocab_size=vocab_size,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        synchronize=lambda: None,
    )
    assert {size: len(row) for size, row in costs.items()} == {1: 3, 2: 3, 4: 2}
    assert all(cost > 0 for row in costs.values() for cost in row)
    assert all(torch.all(layer[1:] == 3.0) for layer in layers)
    assert any(torch.any(layer[0] != 3.0) for layer in layers)


def test_a_choice_has_a_budget_also_where_nothing_is_measured(runner: ModelRunner) -> None:
    steps = GraphRunner(runner, None)

    def budget_of(asked: object) -> object:
        options = EngineOptions(
            steps=TokenSteps(num_speculative_tokens=asked),  # type: ignore[arg-type]
            max_num_seqs=4,
        )
        return open_budget(options, steps, RankGroup(), max_model_len=64)

    assert budget_of(0) is None
    assert budget_of(2) is None
    budget = budget_of(Switch.AUTO)
    assert budget is not None
    assert budget.width == 7  # type: ignore[attr-defined]
