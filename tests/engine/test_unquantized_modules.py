"""An FP8 checkpoint that has some weights in bfloat16, and FP8 weights that a rank cannot keep.

What config.json names is served as it is stored, what it does not name is refused, and what is held
in the compute dtype for its shape is told in one sentence.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.parity import compare_with_transformers
from engine.boot.build import build_model, describe_plain_weights
from engine.config import DeepseekV3Config
from engine.kernels.portable import portable_kernels
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.weights.checkpoint import CheckpointError
from engine.weights.loader import load_weights
from runtime.errors import ConfigError
from tests.engine.parallel.fake_ranks import rank_context
from tests.engine.test_fp8_path import CONFIG, MAX_ERROR, load, run
from tests.engine.tiny import random_tensors, tiny_config, to_fp8, write_checkpoint

LAYER_0 = r"model.layers.0"
UNQUANTIZED: Sequence[tuple[str, ...]] = [
    (r"model.layers.*.self_attn.kv_b_proj",),
    (r"model.layers.*.self_attn.kv_a_proj_with_mqa",),
    (r"model.layers.*.self_attn.q_b_proj",),
    (r"model.layers.*.self_attn.o_proj",),
    (r"model.layers.1.self_attn",),
    (r"model.layers.0.mlp.down_proj",),
    (r"model.layers.0.mlp.gate_proj", r"model.layers.0.mlp.up_proj"),
    (r"model.layers.*.mlp.shared_experts",),
    (r"model.layers.*.mlp.experts",),
]


def build(config: dict[str, Any], **axes: int) -> DeepseekV3ForCausalLM:
    return DeepseekV3ForCausalLM(
        DeepseekV3Config.from_hf(config),
        rank_context(0, **axes).groups,
        dtype=torch.bfloat16,
        kernels=portable_kernels(has_fp8=True),
    )


@pytest.mark.parametrize("names", UNQUANTIZED, ids=str)
def test_named_modules_are_served_as_they_are_stored(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    write_checkpoint(tmp_path, CONFIG, fp8=True, unquantized=names)
    model = load(tmp_path, fp8=True)
    stored = to_fp8(random_tensors(CONFIG), unquantized=names)
    num_plain = 0
    for part in model.weight_slices():
        if part.destination is not None and stored[part.name].dtype == torch.bfloat16:
            window = tuple(slice(start, end) for start, end in part.ranges)
            assert part.scale is None, part.name
            assert torch.equal(part.destination, stored[part.name][window]), part.name
            num_plain += 1
    assert num_plain > 0
    expected, actual = run(load(tmp_path, fp8=False), [9, 1, 33]), run(model, [9, 1, 33])
    assert (actual - expected).norm() < MAX_ERROR * expected.norm()
    assert describe_plain_weights(model)


def test_it_is_the_model_of_transformers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, fp8=True, unquantized=("kv_b_proj", r"model.layers.1.mlp"))
    report = compare_with_transformers(tmp_path, num_prompts=1, num_steps=8)
    assert report.passed, report.format()


@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj"])
def test_a_module_that_is_not_named_is_refused(tmp_path: Path, name: str) -> None:
    """It would be rounded to FP8: another model than the one that was tested by its makers."""
    tensors = to_fp8(random_tensors(CONFIG), unquantized=(f"layers.0.{name}",))
    write_checkpoint(tmp_path, CONFIG, tensors=tensors)
    with pytest.raises(
        CheckpointError, match="stored as BF16, and by quantization_config"
    ) as error:
        load(tmp_path, fp8=True)
    assert error.value.tensor == f"{LAYER_0}.{name}.weight"
    assert "quantization_config.modules_to_not_convert" in str(error.value)
    load(tmp_path, fp8=False)  # where nothing is kept in FP8 it is what it is


def test_some_routed_experts_are_refused_before_anything_is_read() -> None:
    config = {**CONFIG, "quantization_config": dict(CONFIG["quantization_config"])}
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.1.mlp.experts"]
    with pytest.raises(ConfigError, match="served in one format"):
        build(config)


def test_shares_that_are_not_whole_blocks_are_told_in_one_sentence() -> None:
    """Of 4 ranks each has 32 of 128 columns of o_proj, and 32 of the 128 rows of an expert."""
    sentence = describe_plain_weights(build(CONFIG, tp=4))
    assert "model.layers.0.self_attn.o_proj and 2 alike (256 rows x 32 columns" in sentence
    assert "model.layers.0.mlp.gate_up_proj (64 + 64 rows x 256 columns" in sentence
    assert "model.layers.1.mlp.experts.up and 1 alike (32 + 32 rows x 256 columns" in sentence
    assert "are not blocks of 128" in sentence
    assert "qkv_a_proj" not in sentence, "every rank has it whole"
    assert "eh_proj" not in sentence, "no checkpoint has it in FP8"


def test_a_width_of_the_model_that_is_not_whole_blocks_is_told() -> None:
    """Of the two products of an expert neither is in FP8 then."""
    config = tiny_config(
        hidden_size=160,
        moe_intermediate_size=128,
        quantization_config={"quant_method": "fp8"},
    )
    model = build(config)
    sentence = describe_plain_weights(model)
    assert "experts.up and 1 alike (128 + 128 rows x 160 columns are not" in sentence
    assert "experts.down and 1 alike (160 rows x 128 columns are not" in sentence


def test_nothing_is_told_where_all_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    config = {**CONFIG, "qk_rope_head_dim": 16, "kv_lora_rank": 128}
    assert describe_plain_weights(build(config)) == ""
    with caplog.at_level(logging.WARNING):
        build_model(DeepseekV3Config.from_hf(config), load_format="dummy")
    assert caplog.records == []


def test_boot_tells_it_once(caplog: pytest.LogCaptureFixture) -> None:
    config = {**CONFIG, "intermediate_size": 192}
    with caplog.at_level(logging.WARNING, logger="engine.boot.build"):
        build_model(
            DeepseekV3Config.from_hf(config),
            dtype=torch.bfloat16,
            load_format="dummy",
            kernels=portable_kernels(has_fp8=True),
        )
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("held in bfloat16 and not in FP8, with more memory: model.layers.0.")
    assert "192 + 192 rows x 256 columns" in message


def test_fp8_of_which_config_json_says_nothing_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, tensors=to_fp8(random_tensors(tiny_config())))
    with caplog.at_level(logging.WARNING, logger="engine.weights.loader"):
        load_weights(DeepseekV3ForCausalLM(DeepseekV3Config.from_dir(tmp_path)), tmp_path)
    (record,) = caplog.records
    assert "no quantization_config" in record.getMessage()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, torch.int64])
def test_numbers_that_are_no_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = random_tensors(tiny_config())
    name = f"{LAYER_0}.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    write_checkpoint(tmp_path, tensors=tensors)
    with pytest.raises(CheckpointError, match="does not read") as caught:
        load_weights(DeepseekV3ForCausalLM(DeepseekV3Config.from_dir(tmp_path)), tmp_path)
    assert caught.value.tensor == name


def test_scales_as_powers_of_two_are_read(tmp_path: Path) -> None:
    """As DeepSeek-V3.1 has them, in one byte each."""
    tensors = to_fp8(random_tensors(tiny_config()))
    exact = {}
    for name, tensor in tensors.items():
        is_scale = name.endswith("_scale_inv")
        exact[name] = tensor.log2().round().exp2() if is_scale else tensor
        if is_scale:
            tensors[name] = exact[name].to(torch.float8_e8m0fnu)
    models = []
    for folder, content in (tmp_path / "bytes", tensors), (tmp_path / "float", exact):
        write_checkpoint(folder, tensors=content)
        models.append(build_model(folder))
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first, second)
