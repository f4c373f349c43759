"""Rotary position embedding, plain or extended by YaRN.

Only angles are made here; `kernels` turns vectors by them. The formulas of YaRN are those of
https://arxiv.org/abs/2309.00071: frequencies are interpolated between "as trained" for fast
dimensions and "divided by the factor" for slow ones, and the softmax gets a temperature.
"""

import math

import torch
from torch import Tensor

from engine.config import DeepseekV3Config
from engine.yarn import YarnConfig


class RotaryEmbedding:
    """Cosines and sines of positions; the same for every layer of a step."""

    def __init__(self, inverse_frequencies: Tensor, scale: float = 1.0) -> None:
        """Take radians per position of each pair, [R / 2] float32, and a factor of both results."""
        self._inverse_frequencies = inverse_frequencies
        self._scale = scale

    @classmethod
    def of(cls, config: DeepseekV3Config, device: torch.device) -> "RotaryEmbedding":
        """Return that of DeepSeek-V3."""
        return cls(inverse_frequencies(config).to(device), cos_sin_scale(config.yarn))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Map positions [T] to cos and sin, each [T, R / 2] float32."""
        angles = positions.float().unsqueeze(1) * self._inverse_frequencies
        return angles.cos() * self._scale, angles.sin() * self._scale


def inverse_frequencies(config: DeepseekV3Config) -> Tensor:
    """Return radians per position of each pair, [qk_rope_head_dim / 2] float32."""
    dim, base, yarn = config.qk_rope_head_dim, config.rope_theta, config.yarn
    wavelengths = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    trained = 1.0 / wavelengths
    if yarn is None:
        return trained
    low = _pair_with_rotations(yarn.beta_fast, dim, base, yarn)
    high = _pair_with_rotations(yarn.beta_slow, dim, base, yarn)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # 1 up to the pair `low` (keep as trained), falling to 0 at the pair `high` (stretch). Where no
    # pair lies between, the sign of the width says on which side all of them are.
    width = high - low or 0.001
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (yarn.factor * wavelengths) * (1 - keep) + trained * keep


def cos_sin_scale(yarn: YarnConfig | None) -> float:
    """Return the factor of cos and sin; 1 where mscale equals mscale_all_dim, as in DeepSeek-V3."""
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def softmax_scale(config: DeepseekV3Config) -> float:
    """Return the factor of attention scores: 1 / sqrt(qk_head_dim), with YaRN's temperature."""
    scale = 1.0 / math.sqrt(config.qk_head_dim)
    if config.yarn is not None and config.yarn.mscale_all_dim:
        scale *= _mscale(config.yarn.factor, config.yarn.mscale_all_dim) ** 2
    return scale


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _pair_with_rotations(rotations: float, dim: int, base: float, yarn: YarnConfig) -> float:
    """Return which dimension turns `rotations` times within the trained context."""
    context = yarn.original_max_position_embeddings
    turns = math.log(context / (rotations * 2 * math.pi))
    return dim * turns / (2 * math.log(base))
