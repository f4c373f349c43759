"""Every field that transformers' LlamaConfig knows is read, refused, or without effect."""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig as TheirConfig
from transformers.models.llama import modeling_llama

from engine.hf_config.llama import READ, SERVED_VALUES, WITHOUT_EFFECT
from engine.model.llama import inverse_frequencies
from engine.model.llama_config import LlamaConfig
from runtime.errors import ConfigError
from tests.engine.hf_config.both_sides import assert_alike
from tests.engine.hf_config.test_every_field import OF_MASKS_AND_CACHES, OF_OLD_FILES
from tests.engine.tiny_llama import LLAMA3, llama_config, write_llama

BASE: Mapping[str, Any] = llama_config(hidden_size=32, num_hidden_layers=2, vocab_size=96)
OF_EXPERTS = {"experts_implementation"}
EVERY_FIELD = sorted(
    {field.name for field in dataclasses.fields(TheirConfig)}
    | set(TheirConfig.attribute_map)
    | (OF_OLD_FILES - OF_EXPERTS)
    | OF_MASKS_AND_CACHES
)
OTHER_VALUES: dict[str, list[Any]] = {
    "vocab_size": [80],
    "hidden_size": [48],
    "intermediate_size": [40],
    "num_hidden_layers": [1],
    "num_attention_heads": [16, 4],
    "num_key_value_heads": [1, 2, 8, None],
    "head_dim": [8, 6],
    "max_position_embeddings": [128],
    "rms_norm_eps": [0.3],
    "tie_word_embeddings": [True],
    "rope_theta": [300.0],
    "rope_scaling": [dict(LLAMA3), {**LLAMA3, "rope_theta": 70.0}, {"rope_type": "default"}],
    "rope_parameters": [{**LLAMA3, "rope_theta": 500.0}, {"rope_theta": 500.0}],
}
REQUIRED = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
}
REFUSED: dict[str, list[Any]] = {
    "architectures": [["DeepseekV3ForCausalLM"]],
    "model_type": ["mistral"],
    "hidden_size": [36, 0],
    "num_key_value_heads": [3, 0],
    "head_dim": [7, 0],
    "vocab_size": [None, "many"],
    "rms_norm_eps": [-1.0, None],
    "rope_theta": [0],
    "layer_types": [["sliding_attention", "full_attention"]],
    "partial_rotary_factor": [0.5],
    "quantization_config": [{"quant_method": "fp8"}],
    "rope_scaling": [
        {"rope_type": "yarn", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {**LLAMA3, "mystery": 1},
        {**LLAMA3, "factor": 0.5},
        {**LLAMA3, "low_freq_factor": 0},
        {**LLAMA3, "high_freq_factor": 1.0},
        {"rope_type": "llama3"},
    ],
}


def read(fields: Mapping[str, Any]) -> LlamaConfig:
    return LlamaConfig.from_hf(fields)


def test_every_field_is_known() -> None:
    known = READ | SERVED_VALUES.keys() | WITHOUT_EFFECT.keys()
    assert [name for name in EVERY_FIELD if name not in known] == []
    assert not READ & SERVED_VALUES.keys()
    assert not (READ | SERVED_VALUES.keys()) & WITHOUT_EFFECT.keys()


def test_what_the_model_s_code_reads_is_read_or_refused() -> None:
    names = set(re.findall(r"config\.(\w+)", inspect.getsource(modeling_llama)))
    without_effect = {"attention_dropout", "initializer_range", "pad_token_id"}
    assert without_effect <= WITHOUT_EFFECT.keys()
    assert names - READ - SERVED_VALUES.keys() - without_effect == {"_attn_implementation"}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, many in OTHER_VALUES.items() for value in many]
)
def test_what_is_read_gives_transformers_logits(tmp_path: Path, name: str, value: object) -> None:
    fields = {**BASE, name: value}
    if name == "rope_parameters":
        del fields["rope_scaling"], fields["rope_theta"]
    assert read(fields) != read(BASE) or value == {"rope_type": "default"}
    assert_alike(write_llama(tmp_path, fields, seed=3))


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, many in REFUSED.items() for value in many]
    + [(name, "other") for name in SERVED_VALUES],
)
def test_what_is_not_served_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read({**BASE, name: value})
    assert caught.value.path.split(".")[0] == name
    assert caught.value.fix


@pytest.mark.parametrize("name", sorted(BASE.keys() - {"architectures"}))
def test_absent_is_refused_or_means_transformers_default(name: str) -> None:
    absent = {key: value for key, value in BASE.items() if key != name}
    if name in ("eos_token_id", "bos_token_id", "rope_scaling", "rope_theta", "model_type"):
        read(absent)  # the router has other places to look; rotary settings have tests of their own
        return
    default = getattr(TheirConfig(), name)
    if name in REQUIRED:
        with pytest.raises(ConfigError, match="is absent") as caught:
            read(absent)
        assert (caught.value.path, caught.value.value) == (name, None)
        return
    if name == "head_dim":  # a default of its own that follows from others
        default = BASE["hidden_size"] // BASE["num_attention_heads"]
    if name == "num_key_value_heads":
        default = BASE["num_attention_heads"]
    assert read(absent) == read({**absent, name: default})


def test_what_nobody_knows_and_what_is_left_out_is_told() -> None:
    fields = {**BASE, "mystery": 1, "n_routed_experts": 8}
    del fields["rms_norm_eps"]
    assert read(fields).remarks == (
        "config.json leaves out rms_norm_eps = 1e-06: transformers' defaults",
        "config.json says mystery, n_routed_experts: not read here, nor by transformers' Llama",
    )
    assert read({**BASE, "use_cache": False, "torch_dtype": "bfloat16"}).remarks == ()


@pytest.mark.parametrize("factor", [1.0, 8.0, 32.0])
@pytest.mark.parametrize("trained", [16, 8192, 10**6])
def test_frequencies_of_llama_3_are_those_of_transformers(factor: float, trained: int) -> None:
    scaling = {**LLAMA3, "factor": factor, "original_max_position_embeddings": trained}
    fields = llama_config(head_dim=128, rope_theta=500000.0, rope_scaling=scaling)
    theirs = modeling_llama.LlamaRotaryEmbedding(TheirConfig.from_dict(dict(fields)))
    torch.testing.assert_close(
        inverse_frequencies(read(fields)), theirs.inv_freq, rtol=2e-6, atol=0
    )
