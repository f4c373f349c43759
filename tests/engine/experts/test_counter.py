"""The counter counts what gates choose: each row of a request once a layer, nothing else."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.boot.build import build_kv_pool, build_model
from engine.boot.experts import count_experts
from engine.experts.counter import Counts, ExpertCounter
from engine.experts.placements import ExpertPlacements
from engine.graphs.graph_runner import capture_steps
from engine.layers.moe import Gate
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.sampling import SamplingParams
from tests.engine.tiny import TINY, tiny_config, write_checkpoint
from tests.engine.tiny_llama import write_llama

EXPERTS, TOP_K = TINY["n_routed_experts"], TINY["num_experts_per_tok"]
MTP_LAYER = TINY["num_hidden_layers"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tiny_config())


class Chosen:
    """What the gates of a model return, by layer, counted apart."""

    def __init__(self, model: DeepseekV3ForCausalLM, counter: ExpertCounter) -> None:
        self.counts = torch.zeros(len(counter.layers), EXPERTS, dtype=torch.int64)
        gates = [module for module in model.modules() if isinstance(module, Gate)]
        assert len(gates) == len(counter.layers)
        for row, gate in enumerate(gates):
            gate.register_forward_hook(self._hook(row))

    def _hook(self, row: int) -> object:
        def add(_: object, __: object, result: tuple[Tensor, Tensor]) -> None:
            ids = result[0]
            self.counts[row] += ids[ids >= 0].bincount(minlength=EXPERTS)

        return add


def requests(count: int, *, length: int) -> list[ScheduledRequest]:
    return [
        ScheduledRequest(
            Request(
                request_id=str(index),
                prompt_token_ids=[(7 * index + 3 * i) % 128 for i in range(length)],
                sampling=SamplingParams(temperature=0.0),
                num_computed_tokens=length - 1,
                block_table=[1 + index],
            ),
            1,
        )
        for index in range(count)
    ]


def counted(counter: ExpertCounter) -> Counts:
    return counter.start_reading().read()


@pytest.mark.parametrize("num_drafts", [0, 1])
def test_fixed_steps_count_the_rows_of_requests(checkpoint: Path, num_drafts: int) -> None:
    model = build_model(checkpoint, with_mtp=num_drafts > 0)
    assert isinstance(model, DeepseekV3ForCausalLM)
    counter = count_experts(model)
    assert counter is not None
    mtp = (MTP_LAYER,) if num_drafts else ()
    assert counter.layers == (1, 2, *mtp)
    pool = build_kv_pool(model, 16, block_size=16)
    runner = ModelRunner(model, pool, Sampler(model.config.vocab_size))
    steps = capture_steps(
        runner, max_num_seqs=8, max_model_len=16, num_drafts=num_drafts, use_graphs=False
    )
    assert not counted(counter).any()  # capturing runs padding alone
    chosen = Chosen(model, counter)
    for count in (3, 5, 8):
        before = counted(counter)
        steps.launch(requests(count, length=6), group_mean=7).collect()
        rows = (counted(counter) - before).sum(axis=1)
        # A row without a draft is a token at least; with one it may be two.
        assert (rows[:2] >= count * TOP_K).all()
        assert (rows[:2] <= count * (1 + num_drafts) * TOP_K).all()
        assert (rows[:2] == rows[0]).all()
        steps.run_dummy(group_mean=7)
    assert torch.from_numpy(counted(counter)).equal(chosen.counts)
    if not num_drafts:
        assert (counted(counter).sum(axis=1) == (3 + 5 + 8) * TOP_K).all()


def test_a_dummy_step_counts_nothing(checkpoint: Path) -> None:
    model = build_model(checkpoint)
    counter = count_experts(model)
    assert counter is not None
    model.forward(ForwardBatch.dummy(), build_kv_pool(model, 4, block_size=4))
    assert not counted(counter).any()


def test_logical_experts_are_counted_wherever_they_stand(checkpoint: Path) -> None:
    slots = [7, 6, 5, 4, 3, 2, 1, 0, 7, 7]
    readings = []
    moved = ExpertPlacements.alike(slots, EXPERTS, layers=range(1, 3))
    for placements in None, moved:
        model = build_model(checkpoint, placements=placements)
        counter = count_experts(model)
        assert counter is not None
        pool = build_kv_pool(model, 16, block_size=16)
        ModelRunner(model, pool, Sampler(128)).execute(requests(7, length=9))
        readings.append(counted(counter))
    assert (readings[0] == readings[1]).all()
    assert readings[0].sum() == 7 * TOP_K * 2


def test_a_reading_is_of_its_moment() -> None:
    counter = ExpertCounter((0,), 4, 1)
    bins = counter.bins(0)
    bins[2] += 5
    reading = counter.start_reading()
    bins[2] += 1
    assert reading.read().tolist() == [[0, 0, 5, 0]]
    assert counted(counter).tolist() == [[0, 0, 6, 0]]


def test_a_dense_model_has_no_counter(tmp_path: Path) -> None:
    assert count_experts(build_model(write_llama(tmp_path))) is None
