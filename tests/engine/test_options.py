"""Options of an engine: what bounds a step, what is captured, and refusals in the asker's words."""

from dataclasses import replace
from typing import Any

import pytest

from engine.options import ChunkSteps, EngineOptions, KVOptions, Switch, TokenSteps
from runtime.errors import ConfigError

CHUNKS = EngineOptions(steps=ChunkSteps(max_num_batched_tokens=100), max_num_seqs=7)
TOKENS = EngineOptions(steps=TokenSteps(), max_num_seqs=7)


def test_a_step_is_bounded_by_tokens_or_by_requests() -> None:
    assert CHUNKS.token_bound == ("max_num_batched_tokens", 100)
    assert TOKENS.token_bound == ("max_num_seqs", 7)


@pytest.mark.parametrize(
    ("steps", "device", "wanted"),
    [
        (TokenSteps(), "cuda", True),
        (TokenSteps(cuda_graphs=Switch.ON), "cuda", True),
        (TokenSteps(cuda_graphs=Switch.OFF), "cuda", False),
        (TokenSteps(cuda_graphs=Switch.ON), "cpu", False),
        (ChunkSteps(), "cuda", True),
        (ChunkSteps(cuda_graphs=Switch.OFF), "cuda", False),
        (ChunkSteps(cuda_graphs=Switch.ON), "cpu", False),
    ],
)
def test_steps_are_captured_on_a_gpu(
    steps: ChunkSteps | TokenSteps, device: str, wanted: bool
) -> None:
    assert EngineOptions(steps=steps, device=device).wants_graphs is wanted


def test_a_field_is_called_as_whoever_asked_calls_it() -> None:
    assert TOKENS.named("num_blocks") == "num_blocks"
    assert replace(TOKENS, prefix="decode.").named("num_blocks") == "decode.num_blocks"


@pytest.mark.parametrize(
    ("changes", "field", "fix"),
    [
        ({"device": "tpu"}, "device", '"cpu" or "cuda"'),
        ({"num_threads": 0}, "num_threads", "1 or more"),
        ({"max_num_seqs": 0}, "max_num_seqs", "1 or more"),
        ({"num_redundant_experts": -1}, "num_redundant_experts", "0 or more"),
        ({"steps": ChunkSteps(max_num_batched_tokens=0)}, "max_num_batched_tokens", "1 or more"),
        ({"steps": TokenSteps(max_tokens_per_rank=0)}, "max_tokens_per_rank", "1 or more"),
        ({"kv": KVOptions(block_size=0)}, "block_size", "1 or more"),
        ({"kv": KVOptions(num_blocks=0)}, "num_blocks", "2 or more"),
        ({"device": "cuda", "kv": KVOptions(num_blocks=1)}, "num_blocks", "2 or more"),
        ({"kv": KVOptions(gpu_memory_fraction=0.0)}, "gpu_memory_fraction", "above 0, at most 1"),
        ({"kv": KVOptions(gpu_memory_fraction=1.1)}, "gpu_memory_fraction", "above 0, at most 1"),
    ],
)
def test_what_no_engine_can_work_with_is_refused(
    changes: dict[str, Any], field: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(TOKENS, prefix="mine.", **changes)
    assert (caught.value.path, caught.value.fix) == (f"mine.{field}", fix)


def test_a_gpu_may_be_asked_for_as_many_blocks_as_fit() -> None:
    assert replace(TOKENS, device="cuda", kv=KVOptions(num_blocks=0)).kv.num_blocks == 0
