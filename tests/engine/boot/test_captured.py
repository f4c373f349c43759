"""Short steps are captured where that is wanted and possible, and a rank says where it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.boot.build import build_kv_pool, build_model
from engine.boot.captured import capture_short_steps, steps_to_capture
from engine.boot.kv_size import measure_memory
from engine.config import DeepseekV3Config
from engine.graphs.chunk_graphs import ChunkGraphs
from engine.graphs.step_graphs import StepGraphs
from engine.kernels.portable import portable_kernels
from engine.memory.kv_budget import MemorySums
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.options import ChunkSteps, EngineOptions, KVOptions, Switch, TokenSteps
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.step_error import StepError
from engine.streams import Streams
from runtime.errors import ConfigError
from runtime.sampling import SamplingParams
from tests.engine.tiny import tiny_config

GIB = 2**30
MAX_MODEL_LEN = 64
FORBIDDEN = RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")


@pytest.fixture
def model() -> DeepseekV3ForCausalLM:
    kernels = portable_kernels(has_paged_attention=True)
    config = DeepseekV3Config.from_hf(tiny_config())
    built = build_model(config, load_format="dummy", kernels=kernels)
    assert isinstance(built, DeepseekV3ForCausalLM)
    built.attention.rule = replace(built.attention.rule, absorbed_cost=0.0)
    return built


def options(graphs: str = "auto", device: str = "cuda", num_blocks: int = 9) -> EngineOptions:
    return EngineOptions(
        steps=ChunkSteps(max_num_batched_tokens=40, cuda_graphs=Switch(graphs)),
        device=device,
        max_num_seqs=2,
        kv=KVOptions(num_blocks=num_blocks, block_size=8),
        prefix="prefill.",
    )


def make_runner(model: DeepseekV3ForCausalLM) -> ModelRunner:
    pool = build_kv_pool(model, 9, block_size=8)
    return ModelRunner(model, pool, Sampler(model.config.vocab_size))


def capture(
    model: DeepseekV3ForCausalLM, asked: EngineOptions, sums: MemorySums | None = None
) -> tuple[ModelRunner, ModelRunner, Any]:
    """Return the runner that there was, the one to use, and what forgets graphs."""
    runner = make_runner(model)
    chosen, forget = capture_short_steps(
        asked, model, runner, MAX_MODEL_LEN, sums, streams=Streams(model.device)
    )
    return runner, chosen, forget


def fail(model: DeepseekV3ForCausalLM, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def forward(*_: object, **__: object) -> object:
        raise error

    monkeypatch.setattr(model, "forward", forward)


def suffix() -> list[ScheduledRequest]:
    request = Request(
        request_id="a",
        prompt_token_ids=list(range(50)),
        sampling=SamplingParams(temperature=0.0),
        block_table=list(range(1, 8)),
        num_computed_tokens=40,
    )
    return [ScheduledRequest(request, 10)]


def test_a_gpu_rank_replays_its_short_steps(model: DeepseekV3ForCausalLM) -> None:
    plain, chosen, forget = capture(model, options())
    assert chosen is not plain
    (expected,), (found,) = plain.execute(suffix()), chosen.execute(suffix())
    assert expected.sampled is not None
    assert found.sampled is not None
    assert found.sampled.token_id == expected.sampled.token_id
    forget()
    with pytest.raises(StepError, match="AssertionError"):
        chosen.execute(suffix())


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"graphs": "off"}])
def test_others_do_not(model: DeepseekV3ForCausalLM, changes: dict[str, str]) -> None:
    plain, chosen, _ = capture(model, options(**changes))
    assert chosen is plain


def test_what_cannot_be_captured_runs_without_graphs(
    model: DeepseekV3ForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fail(model, monkeypatch, FORBIDDEN)
    plain, chosen, _ = capture(model, options())
    assert chosen is plain
    assert "without graphs" in caplog.text
    assert "and more" not in caplog.text
    with pytest.raises(ConfigError, match="not permitted when stream is capturing") as caught:
        capture(model, options("on"))
    assert (caught.value.path, caught.value.fix) == ("prefill.cuda_graphs", '"off"')


def test_ranks_with_prompts_of_their_own_are_refused_only_by_name(
    model: DeepseekV3ForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    model.groups = ProcessGroups(dims=ParallelDims(dp=2, ep=2))
    with caplog.at_level("INFO"):
        plain, chosen, _ = capture(model, options())
    assert chosen is plain
    assert "prompts of their own" in caplog.text
    with pytest.raises(ConfigError, match=r"prefill\.cuda_graphs = 'on': ranks have prompts"):
        capture(model, options("on"))
    assert steps_to_capture(options(), model, MAX_MODEL_LEN, Streams(model.device)).sizes == ()


def test_too_little_memory_is_refused_with_blocks_that_fit(
    model: DeepseekV3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = MemorySums(
        total=100 * GIB, used=60 * GIB, graphs=2 * GIB, activations=GIB,
        block_bytes=GIB // 200, fraction=1.0,
    )  # fmt: skip
    fail(model, monkeypatch, torch.OutOfMemoryError("CUDA out of memory.\nSee docs"))
    with pytest.raises(ConfigError) as caught:
        capture(model, options(num_blocks=7000), sums)
    assert (caught.value.path, caught.value.value) == ("prefill.num_blocks", 7000)
    assert "captured steps took more than the 2.00 GiB" in caught.value.problem
    assert "\n" not in str(caught.value)


def test_steps_are_made_of_the_sizes_that_are_asked_for(model: DeepseekV3ForCausalLM) -> None:
    pool = build_kv_pool(model, 2, block_size=8)
    found = steps_to_capture(options(), model, MAX_MODEL_LEN, Streams(model.device))
    assert found.sizes == (16, 32, 40)
    steps = found.make(pool, found.sizes[-2:])
    assert isinstance(steps, ChunkGraphs)
    assert steps.sizes == (32, 40)
    tokens = EngineOptions(steps=TokenSteps(), device="cuda", max_num_seqs=3)
    found = steps_to_capture(tokens, model, MAX_MODEL_LEN, Streams(model.device))
    assert found.sizes == (1, 2, 3)
    assert isinstance(found.make(pool, found.sizes), StepGraphs)


def test_captured_short_steps_count_before_the_pool(
    model: DeepseekV3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.boot import kv_size

    monkeypatch.setattr(kv_size, "_memory", lambda _: (50 * GIB, 100 * GIB))
    monkeypatch.setattr(kv_size, "_peak_bytes", lambda *_: GIB)
    seen = []

    def measure(_: object, make: object, sizes: tuple[int, ...], **__: object) -> int:
        seen.append(sizes)
        return 3 * GIB

    monkeypatch.setattr(kv_size, "measure_graph_bytes", measure)
    for graphs, expected in (("auto", 3 * GIB), ("off", 0)):
        sums = measure_memory(
            options(graphs, num_blocks=0),
            model,
            max_model_len=MAX_MODEL_LEN,
            streams=Streams(model.device),
        )
        assert sums is not None
        assert sums.graphs == expected
    assert seen == [(16, 32, 40)]
