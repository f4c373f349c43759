"""The model with paged attention gives the tokens of the model without, in pools of any dtype."""

from pathlib import Path

import pytest
import torch

from engine.build import build_model
from engine.generate import generate
from engine.kernels.portable import PortableKernels
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
    paged = build_model(checkpoint, kernels=PortableKernels(has_paged_attention=True))
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
        kernels = PortableKernels(has_fp8=True, has_paged_attention=is_paged)
        model = build_model(checkpoint, dtype=torch.bfloat16, kernels=kernels)
        outputs.append([item.token_ids for item in generate(model, PROMPTS, SAMPLING)])
    assert outputs[0] == outputs[1]
