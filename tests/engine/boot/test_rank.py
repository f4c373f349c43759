"""What a rank makes before its KV pool takes the memory, and what it says when that is too late."""

from pathlib import Path

import pytest
import torch

from engine.boot import rank
from engine.boot.kv_size import measure_memory
from engine.boot.rank import BootedRank, boot_rank
from engine.layers.mla import MLA
from engine.memory.kv_budget import MemorySums
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.parallel.dims import ParallelDims
from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from runtime.errors import ConfigError
from runtime.net import Credentials, Listen
from runtime.worker import WorkerOptions
from tests.engine.tiny import write_checkpoint

GIB = 2**30


def boot_role(role: str, folder: Path) -> BootedRank:
    config = ClusterConfig(
        model=ModelSection(path=str(write_checkpoint(folder / "model")), max_model_len=64),
        prefill=PrefillSection(num_blocks=8),
        decode=DecodeSection(num_blocks=8),
    )
    options = WorkerOptions(
        role=role,
        config=config,
        instance=f"{role}-0",
        rank=0,
        rendezvous="",
        router="127.0.0.1:1",
        listen=Listen(bind="127.0.0.1"),
        credentials=Credentials(secret="secret"),
    )
    return boot_rank(options, ParallelDims())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_weights_of_absorbed_attention_are_made_before_memory_is_measured(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both roles absorb: decode always, prefill where few tokens are new."""
    are_made: list[bool] = []

    def measure(section: object, model: DeepseekV3ForCausalLM, **kwargs: object) -> object:
        layers = [module for module in model.modules() if isinstance(module, MLA)]
        assert layers
        are_made.extend(layer._up_weight is not None for layer in layers)
        return measure_memory(section, model, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(rank, "measure_memory", measure)
    booted = boot_role(role, tmp_path)
    assert are_made
    assert all(are_made)
    assert booted.kv_pool.num_blocks == 8
    assert booted.sums is None, "a CPU's memory is not measured"


SUMS = MemorySums(
    total=100 * GIB, used=60 * GIB, graphs=0, activations=3 * GIB,
    block_bytes=2**20, fraction=0.92,
)  # fmt: skip


@pytest.mark.parametrize(
    ("section", "sums", "path", "fix"),
    [
        (PrefillSection(device="cuda", num_blocks=0), SUMS, "prefill.gpu_memory_fraction",
         "0.89 or less"),
        (DecodeSection(device="cuda", num_blocks=0), SUMS, "decode.gpu_memory_fraction",
         "0.89 or less"),
        (PrefillSection(device="cuda", num_blocks=30_000), SUMS, "prefill.num_blocks",
         "26928 or less, or 0 for as many as fit"),
        (PrefillSection(device="cuda", num_blocks=300), None, "prefill.max_num_batched_tokens",
         "512 or less, fewer prefill.num_blocks, or more ranks"),
    ],
)  # fmt: skip
def test_a_rehearsed_step_without_memory_names_what_to_lower(
    section: PrefillSection | DecodeSection,
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

    runner = boot_role("prefill", tmp_path).runner
    monkeypatch.setattr(rank, "rehearse", run_out)
    monkeypatch.setattr(type(runner.kv_pool), "device", torch.device("cuda"))
    monkeypatch.setattr(runner, "run_dummy", lambda: None)
    with pytest.raises(ConfigError, match="the largest step") as caught:
        rank._rehearse(runner, runner.model, section, 64, sums, follows=False)
    assert (caught.value.path, caught.value.fix) == (path, fix)
