"""What `quantization_config` may say, and which modules it leaves as they are."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.quantizers.quantizers_utils import should_convert_module

from engine.config import DeepseekV3Config
from engine.hf_config.quantization import ModulePatterns
from engine.weights.expert_format import experts_are_quantized
from runtime.errors import ConfigError
from tests.engine.hf_config.both_sides import BASE, read
from tests.engine.tiny import tiny_config

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LAYER = "model.layers.1"
EXPERTS = f"{LAYER}.mlp.experts"

NAMES = st.sampled_from(
    [
        "lm_head",
        "model.layers.1.self_attn.kv_b_proj",
        "model.layers.11.self_attn.kv_b_proj",
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.shared_experts.gate_proj",
        "model.layers.1.mlp.experts",
    ]
)
PATTERNS = st.sampled_from(
    [
        "lm_head",
        "gate",
        "mlp.gate",
        "model.layers.1",
        "model.layers.1.mlp.gate",
        "model.layers.*.self_attn",
        "model.layers.*.mlp.experts",
        "model.layers.1.",
        "b_proj",
        "self_attn.kv_b_proj",
        "self_attn",
        "experts",
        "model.layers.[01].mlp",
        "lm_head|model.layers.11",
    ]
)


def quantized(**settings: Any) -> DeepseekV3Config | ConfigError:
    return read({**BASE, "quantization_config": {**FP8, **settings}})


@given(name=NAMES, patterns=st.lists(PATTERNS, max_size=3))
def test_patterns_mean_what_they_mean_in_transformers(name: str, patterns: list[str]) -> None:
    assert ModulePatterns(patterns).match(name) != should_convert_module(name, patterns)


def test_a_pattern_of_too_many_repeats_is_none() -> None:
    with pytest.raises(ValueError, match="no names of modules"):
        ModulePatterns(["a{99999999999}"])


@pytest.mark.parametrize("settings", [{}, {"weight_block_size": [64, 64]}, {"scale_fmt": "ue8m0"}])
def test_block_fp8_is_read(settings: dict[str, Any]) -> None:
    config = quantized(activation_scheme="dynamic", fmt="e4m3", **settings)
    assert isinstance(config, DeepseekV3Config)
    assert config.fp8_block_size == settings.get("weight_block_size", [128])[0]
    assert config.unquantized_modules == ()
    assert config.remarks == ()


def test_an_absent_block_size_is_that_of_transformers() -> None:
    assert read({**BASE, "quantization_config": {"quant_method": "fp8"}}) == quantized()


@pytest.mark.parametrize("name", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_are_not_quantised_are_read(name: str) -> None:
    config = quantized(**{name: ["lm_head", f"{LAYER}.self_attn"]})
    assert isinstance(config, DeepseekV3Config)
    assert config.unquantized_modules == ("lm_head", f"{LAYER}.self_attn")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quant_method", "awq"),
        ("quant_method", None),
        ("activation_scheme", "static"),
        ("fmt", "e5m2"),
        ("scale_fmt", "int"),
        ("expert_dtype", "fp4"),
        ("dequantize", True),
        ("modules_to_convert", ["model.embed_tokens"]),
        ("modules_to_not_convert", "lm_head"),
        ("modules_to_not_convert", [1]),
        ("modules_to_not_convert", [""]),
        ("modules_to_not_convert", ["re:(a)\\1"]),
        ("modules_to_not_convert", ["model.layers.[0"]),
        ("weight_block_size", None),
        ("weight_block_size", [1, 128]),
        ("weight_block_size", [128]),
        ("weight_block_size", [0, 0]),
        ("weight_block_size", [128.0, 128.0]),
        ("weight_block_size", ["a", "a"]),
    ],
)
def test_another_format_is_refused_by_setting(name: str, value: object) -> None:
    error = quantized(**{name: value})
    assert isinstance(error, ConfigError)
    assert (error.path, error.value) == (f"quantization_config.{name}", value)
    assert error.fix


def test_a_method_has_to_be_named() -> None:
    error = read({**BASE, "quantization_config": {"weight_block_size": [128, 128]}})
    assert isinstance(error, ConfigError)
    assert error.path == "quantization_config.quant_method"


def test_what_nobody_knows_is_told() -> None:
    config = quantized(kv_cache_scheme="fp8")
    assert isinstance(config, DeepseekV3Config)
    assert "says quantization_config.kv_cache_scheme" in config.remarks[0]


def experts(patterns: list[str], **changes: Any) -> DeepseekV3Config:
    return DeepseekV3Config.from_hf(
        tiny_config(
            quantization_config={**FP8, "modules_to_not_convert": patterns},
            num_nextn_predict_layers=1,
            **changes,
        )
    )


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], True),
        (["lm_head", "model.layers.0.mlp"], True),
        (["mlp.gate"], True),
        (["mlp.experts"], False),
        (["model.layers.*.mlp.experts"], False),
        ([f"model.layers.{layer}" for layer in (1, 2, 3)], False),
        (["gate_proj", "up_proj", "down_proj"], False),
    ],
    ids=str,
)
def test_routed_experts_have_one_format(patterns: list[str], expected: bool) -> None:
    assert experts_are_quantized(experts(patterns)) is expected


@pytest.mark.parametrize("patterns", [[EXPERTS], [f"{EXPERTS}.3.up_proj"], ["gate_proj"]], ids=str)
def test_some_experts_in_another_format_are_refused(patterns: list[str]) -> None:
    with pytest.raises(ConfigError, match="served in one format") as caught:
        experts_are_quantized(experts(patterns))
    assert caught.value.path == "quantization_config.modules_to_not_convert"
    assert caught.value.value == patterns


def test_the_layer_for_drafts_counts_where_it_is_served() -> None:
    config = experts(["model.layers.3"])
    assert experts_are_quantized(config)
    with pytest.raises(ConfigError, match=r"model\.layers\.3"):
        experts_are_quantized(config, with_mtp=True)


def test_an_unquantised_checkpoint_has_none() -> None:
    assert not experts_are_quantized(DeepseekV3Config.from_hf(tiny_config()))
