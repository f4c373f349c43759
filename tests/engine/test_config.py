"""What a config.json may say, and how each refusal names the field."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import DeepseekV3Config, YarnConfig
from runtime.errors import ConfigError
from tests.engine.tiny import YARN, tiny_config


def test_reads_every_field() -> None:
    config = DeepseekV3Config.from_hf(tiny_config(rope_scaling=dict(YARN)))
    assert config.latent_dim == 32 + 8
    assert config.qk_head_dim == 16 + 8
    assert config.num_moe_layers == 2
    assert config.num_kv_layers() == 3
    assert config.num_kv_layers(with_mtp=True) == 4
    assert config.eos_token_ids == (1,)
    assert config.yarn == YarnConfig(
        factor=4.0,
        original_max_position_embeddings=128,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=0.8,
    )


def test_both_rotary_spellings_agree() -> None:
    old = tiny_config(rope_theta=5000.0, rope_scaling=dict(YARN))
    new = {name: value for name, value in old.items() if not name.startswith("rope_")}
    rope = {**YARN, "rope_type": "yarn", "rope_theta": 5000.0}
    new["rope_parameters"] = rope
    assert DeepseekV3Config.from_hf(old) == DeepseekV3Config.from_hf(new)


@pytest.mark.parametrize(
    ("eos", "expected"), [(None, ()), (7, (7,)), ([1, 2], (1, 2))], ids=["none", "one", "list"]
)
def test_end_tokens(eos: object, expected: tuple[int, ...]) -> None:
    assert DeepseekV3Config.from_hf(tiny_config(eos_token_id=eos)).eos_token_ids == expected


def test_fp8_block_size() -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert (
        DeepseekV3Config.from_hf(tiny_config(quantization_config=quantization)).fp8_block_size
        == 128
    )
    assert DeepseekV3Config.from_hf(tiny_config()).fp8_block_size == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["LlamaForCausalLM"]),
        ("model_type", "llama"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("vocab_size", None),
        ("vocab_size", "many"),
        ("vocab_size", 0),
        ("hidden_size", 12.5),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", "</s>"),
        ("rope_scaling", [1]),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("qk_rope_head_dim", 7),
        ("n_routed_experts", 9),
        ("n_group", 8),
        ("topk_group", 3),
        ("num_experts_per_tok", 5),
        ("quantization_config", {"quant_method": "awq"}),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [1, 128]}),
    ],
)
def test_refusal_names_the_field(field: str, value: object) -> None:
    fields: dict[str, Any] = {**tiny_config(), field: value}
    with pytest.raises(ConfigError) as caught:
        DeepseekV3Config.from_hf(fields)
    assert caught.value.path.startswith(field)
    assert caught.value.fix


def test_another_architecture_is_named() -> None:
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM"):
        DeepseekV3Config.from_hf(tiny_config(architectures=["Qwen3ForCausalLM"]))


def test_a_dense_model_needs_no_sensible_routing() -> None:
    config = DeepseekV3Config.from_hf(
        tiny_config(first_k_dense_replace=3, num_nextn_predict_layers=0, n_routed_experts=0)
    )
    assert config.num_moe_layers == 0


@pytest.mark.parametrize("content", [None, "{", "[]"], ids=["absent", "broken", "list"])
def test_unusable_folder(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        DeepseekV3Config.from_dir(tmp_path)
    assert caught.value.value == str(tmp_path)


def test_from_dir(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert DeepseekV3Config.from_dir(tmp_path) == DeepseekV3Config.from_hf(tiny_config())
