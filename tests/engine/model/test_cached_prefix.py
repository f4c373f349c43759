"""A prompt is answered alike whether its prefix was cached or not, however it then attends."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import pack_forward_batch
from engine.boot.build import build_kv_pool, build_model
from engine.kernels.portable import portable_kernels
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from tests.engine.relative_error import relative_error
from tests.engine.tiny import write_checkpoint

BLOCK_SIZE, NUM_TOKENS = 8, 90
SUFFIXES = [1, 2, 7, 17, 40]
TOKENS = np.random.default_rng(0).integers(0, 128, NUM_TOKENS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def build(checkpoint: Path, *, reads_pages: bool, dtype: torch.dtype) -> DeepseekV3ForCausalLM:
    kernels = portable_kernels(has_paged_attention=reads_pages)
    return build_model(checkpoint, kernels=kernels, dtype=dtype)


def run(model: DeepseekV3ForCausalLM, pool: KVPool, start: int, end: int) -> Tensor:
    """Run some tokens behind what is in the pool; logits of all of them."""
    table = np.arange(1, 2 + NUM_TOKENS // BLOCK_SIZE, dtype=np.int32)[None]
    batch = pack_forward_batch(
        TOKENS[start:end],
        np.array([end - start]),
        np.array([end]),
        table,
        logits_indices=np.arange(end - start),
        block_size=BLOCK_SIZE,
    )
    with torch.inference_mode():
        return model.compute_logits(model(batch, pool))


def extend(model: DeepseekV3ForCausalLM, suffix: int) -> Tensor:
    """Answer with the prefix cached: logits of the last `suffix` tokens."""
    pool = build_kv_pool(model, 16, block_size=BLOCK_SIZE)
    pool.data.fill_(float("nan"))
    run(model, pool, 0, NUM_TOKENS - suffix)
    return run(model, pool, NUM_TOKENS - suffix, NUM_TOKENS)


def answer(model: DeepseekV3ForCausalLM) -> Tensor:
    """Answer without a cached prefix: logits of all tokens, decompressed."""
    assert not model.attention_rule.takes_absorbed(NUM_TOKENS, NUM_TOKENS)
    return run(model, build_kv_pool(model, 16, block_size=BLOCK_SIZE), 0, NUM_TOKENS)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("room", [1, 1 << 30], ids=["little-room", "room"])
@pytest.mark.parametrize("reads_pages", [False, True], ids=["gathered", "pages"])
def test_logits_are_those_of_the_whole_prompt(
    checkpoint: Path, reads_pages: bool, room: int, suffix: int
) -> None:
    model = build(checkpoint, reads_pages=reads_pages, dtype=torch.float32)
    rule = replace(model.attention_rule, absorbed_bytes=room)
    model.attention.rule = rule
    expected = answer(model)[-suffix:]
    actual = extend(model, suffix)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(actual.argmax(dim=-1), expected.argmax(dim=-1))


def test_the_suffixes_meet_both_forms(checkpoint: Path) -> None:
    rule = build(checkpoint, reads_pages=False, dtype=torch.float32).attention_rule
    absorbed = [rule.takes_absorbed(suffix, NUM_TOKENS) for suffix in SUFFIXES]
    assert True in absorbed[1:]
    assert False in absorbed


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_in_bfloat16_the_form_costs_no_more_than_rounding_does(
    checkpoint: Path, suffix: int
) -> None:
    exact = answer(build(checkpoint, reads_pages=False, dtype=torch.float32))[-suffix:]
    model = build(checkpoint, reads_pages=False, dtype=torch.bfloat16)
    whole, cached = answer(model)[-suffix:], extend(model, suffix)
    assert relative_error(cached, exact) < 1.5 * relative_error(whole, exact) + 5e-3
