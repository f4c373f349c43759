"""The model with paged attention gives the tokens of the model without, in pools of any dtype."""

import logging
from pathlib import Path

import pytest
import torch

from engine.batch import ForwardBatch
from engine.boot.build import build_kv_pool, build_model
from engine.generate import generate
from engine.kernels.portable import portable_kernels
from runtime.sampling import SamplingParams
from tests.engine.tiny import random_config, tiny_config, write_checkpoint

PROMPTS = [[3, 14, 15, 9, 2, 6], [53], list(range(1, 40)), [58, 9]]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.mark.parametrize("seed", [0, 1, 3])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_paged_steps_sample_the_same_tokens(
    tmp_path: Path, seed: int, kv_dtype: torch.dtype
) -> None:
    checkpoint = write_checkpoint(tmp_path, random_config(seed), seed=seed)
    grouped = build_model(checkpoint)
    paged = build_model(checkpoint, kernels=portable_kernels(has_paged_attention=True))
    outputs = [
        [item.token_ids for item in generate(model, PROMPTS, SAMPLING, kv_dtype=kv_dtype)]
        for model in (grouped, paged)
    ]
    assert outputs[0] == outputs[1]
    assert all(len(tokens) == 12 for tokens in outputs[0])


def test_an_e4m3_pool_changes_the_logits_a_little_only(tmp_path: Path) -> None:
    model = build_model(write_checkpoint(tmp_path))
    sampling = SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=0)
    wide, narrow = (
        generate(model, [PROMPTS[2]], sampling, kv_dtype=dtype)[0]
        for dtype in (torch.float32, torch.float8_e4m3fn)
    )
    wide_p, narrow_p = (
        torch.tensor([item.logprob for item in output.prompt_logprobs]) for output in (wide, narrow)
    )
    difference = (wide_p - narrow_p).abs()
    # The median, because a token near the border between two experts may change sides.
    assert 0 < difference.median() < 0.1


@pytest.mark.parametrize("size", [128, 64])
def test_paged_steps_in_fp8_sample_the_same_tokens(tmp_path: Path, size: int) -> None:
    config = tiny_config(
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_attention_heads=2,
        q_lora_rank=128,
        kv_lora_rank=256,
        qk_nope_head_dim=size,
        v_head_dim=size,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    checkpoint = write_checkpoint(tmp_path, config, fp8=True)
    outputs = []
    for is_paged in (False, True):
        kernels = portable_kernels(has_fp8=True, has_paged_attention=is_paged)
        model = build_model(checkpoint, dtype=torch.bfloat16, kernels=kernels)
        outputs.append([item.token_ids for item in generate(model, PROMPTS, SAMPLING)])
    assert outputs[0] == outputs[1]


def fixed_shape(seq_lens: list[int], num_blocks: int) -> ForwardBatch:
    """Return a step as a graph runs it: tables as wide as any may be, lengths on the device."""
    count = len(seq_lens)
    lens, zeros = torch.tensor(seq_lens), torch.zeros(count, dtype=torch.int64)
    return ForwardBatch(
        input_ids=zeros,
        positions=lens - 1,
        slot_mapping=zeros,
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=lens.int(),
        block_tables=torch.zeros(count, num_blocks, dtype=torch.int32),
        logits_indices=zeros,
        max_seqlen_q=1,
    )


def test_without_pages_a_step_of_fixed_shape_costs_what_its_contexts_are(tmp_path: Path) -> None:
    model = build_model(write_checkpoint(tmp_path))
    plan = model.attention.plan(fixed_shape([9, 3, 17], 1000), build_kv_pool(model, 2)).plan
    assert plan.paged is None
    assert sorted(group.hidden_SQP.shape[2] for group in plan.groups) == [64]
    assert sum(group.hidden_SQP.shape[0] for group in plan.groups) == 3


def test_with_pages_nothing_is_asked_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(
        write_checkpoint(tmp_path), kernels=portable_kernels(has_paged_attention=True)
    )
    batch, pool = fixed_shape([9, 3, 17], 1000), build_kv_pool(model, 2)
    for name in ("tolist", "item", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, None)
    plan = model.attention.plan(batch, pool).plan
    assert plan.paged is not None
    assert plan.paged.block_tables_SB.shape == (3, 1000)


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_gpu_does_not_attend_by_the_reference_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model(write_checkpoint(tmp_path))
    batch, pool = fixed_shape([9], 4), build_kv_pool(model, 2)
    model.attention.plan(batch, pool)
    assert not warnings(caplog), "on a CPU nobody expects another"
    model.attention.device = torch.device("cuda")
    for _ in range(3):
        model.attention.plan(batch, pool)
    (record,) = warnings(caplog)
    assert record.levelname == "WARNING"
    assert "by the reference, slowly: the reference attends in groups" in record.getMessage()
