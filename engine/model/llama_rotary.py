"""The rotary frequencies of Llama, plain or scaled as in Llama 3.1.

That scaling (arXiv:2407.21783; `rope_type = "llama3"`) keeps the pairs that turn often over the
trained context, slows those that turn seldom by a factor, and goes from one to the other in between
by the number of turns.
"""

import math

import torch
from torch import Tensor

from engine.model.llama_config import LlamaConfig


def inverse_frequencies(config: LlamaConfig) -> Tensor:
    """Return radians per position of each pair, [head_dim / 2] float32."""
    dim = config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    trained = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return trained
    turns = scaling.original_max_position_embeddings * trained / (2 * math.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / width).clamp(0, 1)
    return trained * (keep + (1 - keep) / scaling.factor)
