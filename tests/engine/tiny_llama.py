"""Small random Llama checkpoints in the Hugging Face layout; see `tests.engine.tiny`."""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine.tiny import write_checkpoint

TINY_LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama_config(**changes: Any) -> dict[str, Any]:
    """Return the content of a config.json: `TINY_LLAMA` with changes."""
    unknown = set(changes) - set(TINY_LLAMA)
    assert not unknown, unknown
    return {**TINY_LLAMA, **changes}


def random_llama(seed: int) -> dict[str, Any]:
    """Draw a configuration; neighbouring seeds differ in scaling, tying and the sharing of keys."""
    draw = random.Random(seed)
    keys = (1, 2, 4)[seed % 3]
    heads = keys * (1, 2, 4)[seed % 2 + draw.randint(0, 1)]
    return llama_config(
        vocab_size=draw.randint(90, 200),
        hidden_size=heads * draw.choice((6, 10)),
        intermediate_size=draw.choice((56, 96)),
        num_hidden_layers=draw.randint(1, 4),
        num_attention_heads=heads,
        num_key_value_heads=None if keys == heads else keys,
        head_dim=draw.choice((None, 8, 12)),
        rope_theta=draw.choice((10000.0, 500000.0)),
        rope_scaling=dict(LLAMA3) if seed % 4 < 2 else None,
        tie_word_embeddings=seed % 4 in (1, 2),
    )


def llama_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every tensor of the checkpoint with its shape."""
    hidden, vocab, wide = (config[n] for n in ("hidden_size", "vocab_size", "intermediate_size"))
    heads = config["num_attention_heads"]
    width = config["head_dim"] or hidden // heads
    keys = (config["num_key_value_heads"] or heads) * width
    yield "model.embed_tokens.weight", (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * width, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, heads * width),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }.items():
            yield f"model.layers.{index}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def llama_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Invent float32 weights that keep activations in range."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in llama_shapes(config):
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5
    return tensors


def write_llama(path: Path, config: Mapping[str, Any] | None = None, *, seed: int = 0) -> Path:
    """Write config.json and safetensors into `path`, and return it."""
    config = config or TINY_LLAMA
    return write_checkpoint(path, config, tensors=llama_tensors(config, seed))
