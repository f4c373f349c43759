"""Every field that transformers' DeepseekV3Config knows is read, refused, or without effect.

The list of fields is asked of the installed transformers, so one that a new version adds fails here
until somebody has decided. What is read changes our configuration and gives transformers' logits;
what is said to have no effect changes transformers' logits by nothing.
"""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config as TheirConfig
from transformers import GenerationConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from engine.config import DeepseekV3Config
from engine.hf_config.known import ALIASES, READ, SERVED_VALUES, WITHOUT_EFFECT
from runtime.errors import ConfigError
from tests.engine.hf_config.both_sides import (
    BASE,
    assert_alike,
    error_between,
    read,
    their_logits,
    write,
)
from tests.engine.tiny import YARN

OF_THE_CLASS = {field.name for field in dataclasses.fields(TheirConfig)}
# What its base classes take out of the file beside the fields that they declare.
OF_OLD_FILES = {
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "torch_dtype",
    "name_or_path",
    "_commit_hash",
    "num_labels",
    "output_attentions",
    "attn_implementation",
    "experts_implementation",
    "per_layer_config",
}
# What its masks and caches ask a configuration for by `getattr`.
OF_MASKS_AND_CACHES = {
    "is_causal",
    "sliding_window",
    "attention_chunk_size",
    "layer_types",
    "kv_sharing_modes",
}
EVERY_FIELD = sorted(
    OF_THE_CLASS
    | set(TheirConfig.attribute_map)
    | set(TheirConfig.attribute_map.values())
    | {"head_dim", "qk_head_dim"}  # made in its `__post_init__`, and overwritten by the file
    | OF_OLD_FILES
    | OF_MASKS_AND_CACHES
)
GENERATION = sorted(set(GenerationConfig._get_default_generation_params()) - {"use_cache"})

OTHER_VALUES: dict[str, list[Any]] = {
    "architectures": [["LlamaForCausalLM"]],
    "model_type": ["llama"],
    "vocab_size": [80],
    "hidden_size": [40],
    "num_hidden_layers": [1],
    "num_attention_heads": [2],
    "num_key_value_heads": [2, 1],
    "max_position_embeddings": [64],
    "rms_norm_eps": [0.3],
    "tie_word_embeddings": [True],
    "eos_token_id": [5, [5, 6]],
    "bos_token_id": [3],
    "q_lora_rank": [16, None],
    "kv_lora_rank": [24],
    "qk_nope_head_dim": [8],
    "qk_rope_head_dim": [4],
    "head_dim": [16, 4, None],
    "v_head_dim": [8],
    "layer_types": [["sliding_attention", "full_attention"]],
    "rope_theta": [300.0],
    "rope_scaling": [dict(YARN)],
    "rope_parameters": [{**YARN, "rope_theta": 500.0}, {"rope_theta": 500.0}],
    "rope_interleave": [False],
    "partial_rotary_factor": [0.5],
    "intermediate_size": [48],
    "first_k_dense_replace": [0, 2],
    "moe_intermediate_size": [30],
    "n_routed_experts": [4],
    "n_shared_experts": [2],
    "num_experts_per_tok": [1, 4],
    "n_group": [1, 4],
    "topk_group": [2],
    "norm_topk_prob": [False],
    "routed_scaling_factor": [1.0],
    "num_nextn_predict_layers": [1],
    "num_mtp_layers": [1],
    "num_local_experts": [4],
    "quantization_config": ["fp8"],
    "hidden_act": ["gelu"],
    "attention_bias": [True],
    "scoring_func": ["softmax"],
    "topk_method": ["greedy"],
    "moe_layer_freq": [2],
    "is_causal": [False],
    "is_encoder_decoder": [True],
    "sliding_window": [16],
    "attention_chunk_size": [16],
    "kv_sharing_modes": [["own", "reuse"]],
    "per_layer_config": [{"1": {"n_group": 1}}],
    "compression_config": [{"format": "int-quantized"}],
    # without effect
    "attention_dropout": [0.5],
    "initializer_range": [0.5],
    "chunk_size_feed_forward": [3],
    "qk_head_dim": [7],
    "use_cache": [False],
    "dtype": ["bfloat16"],
    "torch_dtype": ["bfloat16"],
    "pad_token_id": [2],
    "pretraining_tp": [2],
    "output_router_logits": [True],
    "output_hidden_states": [True],
    "output_attentions": [True],
    "return_dict": [True],
    "tie_last_hidden_states": [False],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "num_labels": [3],
    "problem_type": ["regression"],
    "attn_implementation": ["eager"],
    "_attn_implementation": ["eager"],
    "experts_implementation": ["grouped_mm"],
    "temperature": [0.1],
}
"""For each field values that are not `BASE`'s; for the other fields any text will do."""
NEEDS_YARN = {"original_max_position_embeddings": [32]}
NOT_OF_THE_MODEL = {
    "architectures",  # tested apart
    "eos_token_id",  # the router has other places to look for them
    "bos_token_id",
    "rope_scaling",  # an old name, without a default
    "rope_theta",
    "num_key_value_heads",  # 128 for transformers, which fails for every other number of heads
}
SHAPED_BY_ANOTHER = {"num_local_experts": "n_routed_experts"}


def values_of(names: set[str]) -> list[tuple[str, Any]]:
    return [(name, value) for name in sorted(names) for value in OTHER_VALUES.get(name, ["text"])]


def changed(name: str, value: object) -> dict[str, Any]:
    fields = {key: old for key, old in BASE.items() if ALIASES.get(name) != key}
    return {**fields, name: value}


def test_every_field_is_known() -> None:
    known = READ | SERVED_VALUES.keys() | WITHOUT_EFFECT.keys()
    assert [name for name in EVERY_FIELD if name not in known] == []
    assert not READ & SERVED_VALUES.keys()
    assert not (READ | SERVED_VALUES.keys()) & WITHOUT_EFFECT.keys()
    assert all(WITHOUT_EFFECT.values()), "each with its reason"


def test_what_the_model_s_code_reads_is_read_or_refused() -> None:
    """Names in its source text; what is left is of training, or is set by itself."""
    names = set(re.findall(r"config\.(\w+)", inspect.getsource(modeling_deepseek_v3)))
    without_effect = {"attention_dropout", "initializer_range", "pad_token_id"}
    assert without_effect <= WITHOUT_EFFECT.keys()
    mapped = {TheirConfig.attribute_map.get(name, name) for name in names}
    ours = READ | SERVED_VALUES.keys() | without_effect
    assert mapped - ours == {"_attn_implementation"}


def test_aliases_are_those_of_transformers() -> None:
    assert dict(ALIASES) == TheirConfig.attribute_map


@pytest.mark.parametrize(("name", "value"), values_of(set(READ)))
def test_what_is_read_gives_transformers_logits(tmp_path: Path, name: str, value: object) -> None:
    fields = changed(name, value)
    if name in NEEDS_YARN:
        fields |= {"rope_scaling": dict(YARN), name: NEEDS_YARN[name][0]}
    config, base = read(fields), read({**BASE, "rope_scaling": fields["rope_scaling"]})
    if isinstance(config, ConfigError):
        assert config.path.split(".")[0] == name
        assert config.value in (value, *(value if isinstance(value, list | dict) else ()))
        assert config.fix
        return
    assert config != base or name == "rope_scaling"
    shaped_by = {**fields, SHAPED_BY_ANOTHER.get(name, name): value}
    shaped_by.setdefault("num_nextn_predict_layers", 0)
    assert_alike(write(tmp_path, fields, shaped_by))


@pytest.mark.parametrize(("name", "value"), values_of(set(SERVED_VALUES)))
def test_what_is_not_served_is_refused(name: str, value: object) -> None:
    error = read(changed(name, value))
    assert isinstance(error, ConfigError)
    assert (error.path, error.value) == (name, value)
    assert error.fix
    for served in SERVED_VALUES[name]:
        assert read(changed(name, served)) == read(BASE)


@pytest.mark.parametrize(("name", "value"), values_of(set(WITHOUT_EFFECT)))
def test_what_is_without_effect_changes_nothing(
    tmp_path: Path, name: str, value: object, base_logits: Any
) -> None:
    fields = changed(name, value)
    config = read(fields)
    assert isinstance(config, DeepseekV3Config)
    assert config == read(BASE)
    assert config.remarks == ()
    assert error_between(their_logits(write(tmp_path, fields, BASE)), base_logits) < 1e-5


@pytest.fixture(scope="module")
def base_logits(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write(tmp_path_factory.mktemp("base"), BASE, BASE)
    assert_alike(folder)
    return their_logits(folder)


@pytest.mark.parametrize("name", EVERY_FIELD)
def test_null_is_refused_or_means_what_it_means_in_transformers(tmp_path: Path, name: str) -> None:
    fields = changed(name, None)
    config = read(fields)
    if isinstance(config, ConfigError):
        assert config.path in (name, ALIASES.get(name))
        assert config.value is None
    elif name in WITHOUT_EFFECT or name == "num_mtp_layers":  # transformers may refuse these
        assert config == read(BASE)
    else:
        shaped_by = {**fields, "num_nextn_predict_layers": 0}
        assert_alike(write(tmp_path, fields, shaped_by))


@pytest.mark.parametrize("name", sorted(BASE.keys() - NOT_OF_THE_MODEL))
def test_absent_is_refused_or_means_transformers_default(name: str) -> None:
    absent = {key: value for key, value in BASE.items() if key != name}
    default = getattr(TheirConfig(), name, None)
    config, expected = read(absent), read({**absent, name: default})
    if isinstance(config, DeepseekV3Config):
        assert config == expected
    elif config.problem.startswith("is absent"):
        assert (config.path, config.value) == (name, None)
    else:  # as a whole it cannot be served, however it is said
        assert isinstance(expected, ConfigError)
        assert (config.path, config.value) == (expected.path, expected.value)
        assert f"leaves out {name} = {default}" in config.problem


@pytest.mark.parametrize(
    "name", ["n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob"]
)
def test_a_routing_that_is_left_out_gives_transformers_logits(tmp_path: Path, name: str) -> None:
    """With sizes for which the defaults of 8 groups, 4 of them and 8 experts a token can be."""
    sizes = {"n_routed_experts": 16, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}
    said = {**BASE, **sizes}
    fields = {key: value for key, value in said.items() if key != name}
    assert_alike(write(tmp_path, fields, said))


def test_generation_defaults_are_not_the_model_s() -> None:
    for name in GENERATION:
        assert read({**BASE, name: 1}) == read(BASE)


def test_what_nobody_knows_is_told() -> None:
    config = read({**BASE, "llama_4_scaling": 2, "mystery": None})
    assert isinstance(config, DeepseekV3Config)
    assert len(config.remarks) == 1
    assert "llama_4_scaling, mystery" in config.remarks[0]


def test_what_is_left_out_is_told() -> None:
    fields = {key: value for key, value in BASE.items() if key != "routed_scaling_factor"}
    config = read(fields)
    assert isinstance(config, DeepseekV3Config)
    assert config.remarks == (
        "config.json leaves out routed_scaling_factor = 2.5: transformers' defaults",
    )


def test_two_names_of_one_field_agree() -> None:
    assert read({**BASE, "num_local_experts": 8}) == read(BASE)
    error = read({**BASE, "num_local_experts": 4})
    assert isinstance(error, ConfigError)
    assert (error.path, error.value) == ("num_local_experts", 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, True, "8", [8]])
def test_what_is_no_number_is_refused(value: object) -> None:
    error = read({**BASE, "routed_scaling_factor": value})
    assert isinstance(error, ConfigError)
    assert error.path == "routed_scaling_factor"


@pytest.mark.parametrize("name", ["rms_norm_eps", "first_k_dense_replace", "n_shared_experts"])
def test_negative_sizes_are_refused(name: str) -> None:
    error = read({**BASE, name: -1})
    assert isinstance(error, ConfigError)
    assert (error.path, error.value) == (name, -1)


def test_a_file_without_a_model_is_refused() -> None:
    unnamed = {key: v for key, v in BASE.items() if key not in ("architectures", "model_type")}
    error = read(unnamed)
    assert isinstance(error, ConfigError)
    assert error.path == "model_type"
    assert read({**unnamed, "architectures": BASE["architectures"]}) == read(BASE)
    assert read({**unnamed, "model_type": "deepseek_v3"}) == read(BASE)
