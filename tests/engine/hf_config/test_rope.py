"""Rotary settings, however they are spelled, give the angles and temperatures of transformers."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import DeepseekV3Config as TheirConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from engine.config import DeepseekV3Config
from engine.layers.rotary import RotaryEmbedding, softmax_scale
from runtime.errors import ConfigError
from tests.engine.hf_config.both_sides import BASE, read
from tests.engine.tiny import YARN

POSITIONS = torch.tensor([0, 1, 17, 400, 5000])
DIM = 16
PLAIN = {name: value for name, value in BASE.items() if not name.startswith("rope_")}
NUMBER = st.floats(0.05, 4.0).map(lambda value: round(value, 3))
OF_YARN: Mapping[str, st.SearchStrategy[Any]] = {
    "factor": st.sampled_from([1, 1.5, 4.0, 40]),
    "original_max_position_embeddings": st.sampled_from([4, 64, 128, 4096, 10**6]),
    "beta_fast": st.sampled_from([None, 0, 1, 8, 32.0]),
    "beta_slow": st.sampled_from([None, 0, 1, 4, 64]),
    "mscale": st.none() | st.just(0) | NUMBER,
    "mscale_all_dim": st.none() | st.just(0) | NUMBER,
    "attention_factor": st.none() | NUMBER,
    "truncate": st.none() | st.booleans(),
    "partial_rotary_factor": st.just(1.0),
    "rope_theta": st.sampled_from([3.0, 50, 10000, 10000.0, 5e6]),
}
NEEDED = {"factor", "original_max_position_embeddings"}
TYPES = st.sampled_from(
    [{"type": "yarn"}, {"rope_type": "yarn"}, {"type": "default", "rope_type": "yarn"}]
)


def angles_of_both(fields: Mapping[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return cos, sin and the factor of attention scores, ours and theirs."""
    config = DeepseekV3Config.from_hf(fields)
    theirs = TheirConfig.from_dict(_copy(fields))
    cos, sin = RotaryEmbedding.of(config, torch.device("cpu"))(POSITIONS)
    their_cos, their_sin = DeepseekV3RotaryEmbedding(theirs)(torch.zeros(1), POSITIONS[None])
    their_scale = DeepseekV3Attention(theirs, 0).scaling
    ours = [cos, sin, torch.tensor(softmax_scale(config))]
    half = config.qk_rope_head_dim // 2
    return ours, [their_cos[0, :, :half], their_sin[0, :, :half], torch.tensor(their_scale)]


def _copy(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers may write into."""
    return {
        name: dict(value) if isinstance(value, dict) else value for name, value in fields.items()
    }


def assert_same_angles(fields: Mapping[str, Any]) -> None:
    for ours, theirs in zip(*angles_of_both(fields), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def with_rope(**rope: Any) -> dict[str, Any]:
    return {**PLAIN, "qk_rope_head_dim": DIM, **rope}


YARN_8 = {**YARN, "factor": 8.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": YARN, "rope_parameters": None},
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_scaling": YARN, "rope_parameters": YARN_8},
        {"rope_scaling": {}, "rope_parameters": YARN_8},
        {"rope_scaling": None, "rope_parameters": YARN_8, "rope_theta": 300.0},
        {"rope_scaling": {**YARN, "rope_theta": 70.0}, "rope_theta": 300.0},
        {"rope_scaling": {**YARN, "attention_factor": 1.7}},
        {"rope_scaling": {**YARN, "attention_factor": 0.0}},
        {"rope_scaling": {**YARN, "truncate": False}},
        {"rope_scaling": {**YARN, "truncate": None}},
        {"rope_scaling": {**YARN, "mscale": None}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": YARN, "original_max_position_embeddings": 32},
        {"rope_scaling": {"type": "default", "rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "rope_type": "default", "factor": 4.0}},
        {"rope_scaling": {"factor": 4.0}},
        {"rope_parameters": {"partial_rotary_factor": 1.0}, "partial_rotary_factor": None},
        {},
    ],
    ids=str,
)
def test_each_spelling(rope: dict[str, Any]) -> None:
    assert_same_angles(with_rope(**rope))


@st.composite
def yarns(draw: st.DrawFn) -> dict[str, Any]:
    settings = dict(draw(TYPES))
    for name, values in OF_YARN.items():
        if name in NEEDED or draw(st.booleans()):
            settings[name] = draw(values)
    return settings


@given(rope=yarns(), place=st.sampled_from(["rope_scaling", "rope_parameters"]), dim=st.just(DIM))
@example(  # all pairs turn faster than beta_fast, so that the border is beyond the last one
    rope={**YARN, "rope_theta": 3.0, "original_max_position_embeddings": 10**6},
    place="rope_scaling",
    dim=64,
)
@example(  # a context that no pair turns once in
    rope={**YARN, "original_max_position_embeddings": 4}, place="rope_scaling", dim=16
)
def test_any_yarn(rope: dict[str, Any], place: str, dim: int) -> None:
    fields = {**with_rope(**{place: rope}), "qk_rope_head_dim": dim}
    assert_same_angles(fields)


@pytest.mark.parametrize(
    ("rope", "path"),
    [
        ({"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": YARN, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {**YARN, "extrapolation_factor": 2.0}}, "extrapolation_factor"),
        ({"rope_scaling": {"full_attention": dict(YARN)}}, "full_attention"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type"),
        ({"rope_scaling": {"rope_type": None, "type": "yarn", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None}}, "factor"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "factor"),
        ({"rope_scaling": {**YARN, "factor": 0}}, "factor"),
        ({"rope_scaling": {**YARN, "beta_fast": -1}}, "beta_fast"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate"),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": None}},
            "original_max_position_embeddings",
        ),
        ({"rope_scaling": YARN, "rope_theta": None}, "rope_theta"),
        ({"rope_scaling": {**YARN, "rope_theta": None}}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta"),
        ({"rope_parameters": "yarn"}, "rope_parameters"),
        ({"rope_scaling": YARN, "rope_parameters": []}, "rope_parameters"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(rope: dict[str, Any], path: str) -> None:
    error = read(with_rope(**rope))
    assert isinstance(error, ConfigError)
    assert error.path.split(".")[-1] == path
    assert error.fix


def test_settings_without_effect_are_told() -> None:
    config = read(with_rope(rope_scaling={"factor": 4.0, "mscale": 1.0}))
    assert isinstance(config, DeepseekV3Config)
    assert config.yarn is None
    assert "says rope_scaling.factor, rope_scaling.mscale" in config.remarks[-1]


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0]}, "rope_type 'longrope' is not"),
        ({"type": "linear", "factor": 2.0}, "rope_type 'linear' is not implemented"),
        ({**YARN, "low_freq_factor": 1.0}, "no setting of rope_type 'yarn'"),
        ({"rope_type": "yarn"}, "of rope_type 'yarn'"),
    ],
    ids=str,
)
def test_refusals_name_the_rope_type(rope: dict[str, Any], told: str) -> None:
    error = read(with_rope(rope_scaling=rope))
    assert isinstance(error, ConfigError)
    assert told in error.problem


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        (
            {"rope_scaling": YARN, "rope_parameters": YARN_8},
            ["config.json says rope_parameters.factor otherwise than rope_scaling, which counts"],
        ),
        (
            {"rope_scaling": {**YARN, "rope_theta": 70.0}, "rope_theta": 300.0},
            ["config.json says rope_theta otherwise than rope_scaling, which counts"],
        ),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 10000.0}}, []),
        ({"rope_scaling": YARN, "rope_theta": 300.0}, []),
        ({"rope_parameters": {**YARN_8, "rope_theta": 70.0}}, []),
    ],
    ids=str,
)
def test_settings_that_others_overrule_are_told(rope: dict[str, Any], told: list[str]) -> None:
    config = read(with_rope(**rope))
    assert isinstance(config, DeepseekV3Config)
    assert [remark for remark in config.remarks if "counts" in remark] == told


def test_two_names_of_the_dtype_that_differ_are_told() -> None:
    for dtype, is_told in (("bfloat16", False), ("float32", True)):
        config = read({**with_rope(), "torch_dtype": "bfloat16", "dtype": dtype})
        assert isinstance(config, DeepseekV3Config)
        assert any("torch_dtype = bfloat16" in remark for remark in config.remarks) == is_told
