"""Steps of decode and short ones of fixed shape are launched in the block that the model chose."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.batch import build_forward_batch
from engine.boot.build import build_kv_pool, build_model
from engine.execution import Execution
from engine.generate import generate
from engine.kernels.launches import Launches
from engine.kernels.portable import portable_kernels
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.request import Request, ScheduledRequest
from runtime.sampling import SamplingParams
from tests.engine.graphs.chunks import run_step, suffix_graphs
from tests.engine.tiny import tiny_config, write_checkpoint

PROMPTS = [[3, 14, 15, 9], [53, 2]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


class Recorder:
    """Counts blocks, and those that are open."""

    def __init__(self) -> None:
        self.num_blocks, self.num_open = 0, 0
        self.asked: list[bool] = []

    def choose(self, device: torch.device, *, are_dependent: bool) -> Launches:
        self.asked.append(are_dependent)
        return self.block

    @contextmanager
    def block(self) -> Iterator[None]:
        self.num_blocks += 1
        self.num_open += 1
        yield
        self.num_open -= 1


def build(tmp_path: Path, execution: Execution) -> DeepseekV3ForCausalLM:
    checkpoint = write_checkpoint(tmp_path, tiny_config(), seed=1)
    kernels = portable_kernels(has_paged_attention=True)
    return build_model(checkpoint, kernels=kernels, execution=execution)


def test_decode_steps_run_in_the_chosen_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    plain = build(tmp_path, Execution())
    monkeypatch.setattr("engine.model.deepseek_v3.choose_launches", recorder.choose)
    watched = build(tmp_path, Execution(dependent_launches=True))
    expected, found = (generate(model, PROMPTS, GREEDY) for model in (plain, watched))
    assert recorder.asked == [True]
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    assert recorder.num_blocks == 5, "the steps behind that of the prompts"
    assert recorder.num_open == 0


def test_short_steps_of_fixed_shape_run_in_the_chosen_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr("engine.model.deepseek_v3.choose_launches", recorder.choose)
    model = build(tmp_path, Execution(dependent_launches=True))
    model.attention.rule = replace(model.attention.rule, absorbed_cost=0.0)
    pool = build_kv_pool(model, 4, block_size=4)
    request = Request(
        request_id="0",
        prompt_token_ids=[3, 14, 15, 9],
        sampling=GREEDY,
        block_table=[1],
    )
    batch = build_forward_batch([ScheduledRequest(request, 4)], 4)
    model.forward(batch, pool)
    assert recorder.num_blocks == 0, "a step of any length"
    graphs = suffix_graphs(
        model,
        pool,
        (4,),
        max_num_seqs=1,
        max_model_len=8,
    )
    graphs.capture()
    before = recorder.num_blocks
    run_step(graphs, batch)
    assert recorder.num_blocks == before + 1
    assert recorder.num_open == 0
