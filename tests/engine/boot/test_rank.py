"""What a rank makes before its KV pool takes the memory, and what it says when that is too late."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.boot import rank
from engine.boot.kv_size import measure_memory
from engine.boot.rank import BootedRank, boot_rank
from engine.generate import generate
from engine.layers.mla import MLA
from engine.memory.kv_budget import MemorySums
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.options import ChunkSteps, EngineOptions, KVOptions, ModelOptions, TokenSteps
from engine.parallel.dims import ParallelDims
from engine.request import Request, ScheduledRequest
from runtime.errors import ConfigError
from runtime.sampling import SamplingParams
from tests.engine.tiny import write_checkpoint

GIB = 2**30


PREFILL = EngineOptions(steps=ChunkSteps(), kv=KVOptions(num_blocks=8), prefix="prefill.")
DECODE = EngineOptions(steps=TokenSteps(), kv=KVOptions(num_blocks=8), prefix="decode.")


def boot(options: EngineOptions, folder: Path, **source: Any) -> BootedRank:
    path = write_checkpoint(folder / "model")
    return boot_rank(ModelOptions(path=path, max_model_len=64, **source), options, ParallelDims())


def on_gpu(options: EngineOptions, num_blocks: int) -> EngineOptions:
    return replace(options, device="cuda", kv=KVOptions(num_blocks=num_blocks))


@pytest.mark.parametrize("options", [PREFILL, DECODE], ids=["chunks", "tokens"])
def test_weights_of_absorbed_attention_are_made_before_memory_is_measured(
    options: EngineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single tokens always attend in the absorbed form, chunks where few tokens are new."""
    are_made: list[bool] = []

    def measure(options: EngineOptions, model: DeepseekV3ForCausalLM, **kwargs: object) -> object:
        layers = [module for module in model.modules() if isinstance(module, MLA)]
        assert layers
        are_made.extend(layer._up_weights is not None for layer in layers)
        return measure_memory(options, model, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(rank, "measure_memory", measure)
    booted = boot(options, tmp_path)
    assert are_made
    assert all(are_made)
    assert booted.kv_pool.num_blocks == 8
    assert booted.sums is None, "a CPU's memory is not measured"


@pytest.mark.parametrize("steps", [ChunkSteps(), TokenSteps()])
def test_options_made_by_hand_run_the_model(steps: ChunkSteps | TokenSteps, tmp_path: Path) -> None:
    booted = boot(EngineOptions(steps=steps, kv=KVOptions(num_blocks=8)), tmp_path)
    prompt, greedy = [3, 1, 4, 1, 5], SamplingParams(temperature=0.0, max_tokens=1)
    request = Request(request_id="one", prompt_token_ids=prompt, sampling=greedy, block_table=[1])
    (result,) = booted.runner.launch([ScheduledRequest(request, len(prompt))]).collect()
    (output,) = generate(booted.runner.model, [prompt], greedy)
    assert result.sampled is not None
    assert [result.sampled.token_id] == list(output.token_ids)


SUMS = MemorySums(
    total=100 * GIB, used=60 * GIB, graphs=0, activations=3 * GIB,
    block_bytes=2**20, fraction=0.92,
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "sums", "path", "fix"),
    [
        (on_gpu(PREFILL, 0), SUMS, "prefill.gpu_memory_fraction",
         "0.89 or less"),
        (on_gpu(DECODE, 0), SUMS, "decode.gpu_memory_fraction",
         "0.89 or less"),
        (on_gpu(PREFILL, 30_000), SUMS, "prefill.num_blocks",
         "26928 or less, or 0 for as many as fit"),
        (on_gpu(PREFILL, 300), None, "prefill.max_num_batched_tokens",
         "512 or less, fewer prefill.num_blocks, or more ranks"),
    ],
)  # fmt: skip
def test_a_rehearsed_step_without_memory_names_what_to_lower(
    options: EngineOptions,
    sums: MemorySums | None,
    path: str,
    fix: str,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never 0 blocks where there are 0."""

    def run_out(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner = boot(PREFILL, tmp_path).runner
    monkeypatch.setattr(rank, "rehearse", run_out)
    monkeypatch.setattr(type(runner.kv_pool), "device", torch.device("cuda"))
    monkeypatch.setattr(runner, "run_dummy", lambda: None)
    with pytest.raises(ConfigError, match="the largest step") as caught:
        rank._rehearse(runner, runner.model, options, 64, sums, follows=False)
    assert (caught.value.path, caught.value.fix) == (path, fix)
