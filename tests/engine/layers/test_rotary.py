"""Angles and temperatures against the implementation in transformers and against hand values."""

import math

import pytest
import torch

from engine.config import DeepseekV3Config
from engine.layers.rotary import RotaryEmbedding, softmax_scale
from tests.engine.tiny import YARN, tiny_config

DEEPSEEK_V3 = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
WITHOUT_MSCALE = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
SCALINGS = [None, dict(YARN), DEEPSEEK_V3, WITHOUT_MSCALE]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dim", [4, 64])
def test_same_as_transformers(scaling: dict[str, object] | None, dim: int) -> None:
    from transformers import DeepseekV3Config as TheirConfig
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    fields = tiny_config(qk_rope_head_dim=dim, rope_scaling=scaling)
    config = DeepseekV3Config.from_hf(fields)
    theirs = TheirConfig.from_dict(dict(fields))
    positions = torch.tensor([0, 1, 17, 400, 5000])
    cos, sin = RotaryEmbedding.of(config, torch.device("cpu"))(positions)
    their_cos, their_sin = modeling.DeepseekV3RotaryEmbedding(theirs)(
        torch.zeros(1), positions[None]
    )
    torch.testing.assert_close(cos, their_cos[0, :, : dim // 2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin, their_sin[0, :, : dim // 2], rtol=1e-5, atol=1e-5)
    assert softmax_scale(config) == pytest.approx(modeling.DeepseekV3Attention(theirs, 0).scaling)


def test_deepseek_v3_temperature() -> None:
    config = DeepseekV3Config.from_hf(
        tiny_config(qk_nope_head_dim=128, qk_rope_head_dim=64, rope_scaling=DEEPSEEK_V3)
    )
    expected = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2
    assert softmax_scale(config) == pytest.approx(expected)
    assert softmax_scale(DeepseekV3Config.from_hf(tiny_config())) == pytest.approx(24**-0.5)
