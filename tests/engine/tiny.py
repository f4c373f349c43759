"""Small random checkpoints in the Hugging Face layout, for every test that needs a model.

`TINY` is one fixed configuration; `random_config` draws others. `write_checkpoint` invents weights
(seeded) and writes config.json and safetensors, optionally as FP8 and in several files. Nothing of
the engine's own loading is used, so that a mistake there cannot hide.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.weights.fp8 import quantize_block

TINY: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

YARN: Mapping[str, Any] = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Return the content of a config.json: `TINY` with changes."""
    unknown = set(changes) - set(TINY) - {"quantization_config", "rope_interleave"}
    assert not unknown, unknown
    return {**TINY, **changes}


def random_config(seed: int) -> dict[str, Any]:
    """Draw a configuration; neighbouring seeds alternate YaRN, q_lora_rank and the groups."""
    draw = random.Random(seed)
    n_group = (1, 2, 4)[seed % 3]
    topk_group = draw.randint(1, n_group)
    experts = n_group * draw.choice((2, 4))
    return tiny_config(
        vocab_size=draw.randint(90, 200),
        hidden_size=draw.choice((40, 64, 72)),
        intermediate_size=draw.choice((56, 96)),
        num_hidden_layers=draw.randint(2, 4),
        num_attention_heads=draw.choice((2, 4)),
        num_key_value_heads=None,
        q_lora_rank=None if seed % 2 else draw.choice((16, 24)),
        kv_lora_rank=draw.choice((24, 32)),
        qk_nope_head_dim=draw.choice((8, 16)),
        qk_rope_head_dim=draw.choice((4, 8)),
        v_head_dim=draw.choice((12, 16)),
        rope_scaling=dict(YARN) if seed % 4 < 2 else None,
        first_k_dense_replace=seed % 3,
        n_routed_experts=experts,
        n_shared_experts=draw.randint(1, 2),
        num_experts_per_tok=draw.randint(1, topk_group * (experts // n_group)),
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=draw.random() < 0.7,
        routed_scaling_factor=draw.choice((1.0, 2.5)),
    )


def expected_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every tensor of the checkpoint with its shape."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    first_mtp = config["num_hidden_layers"]
    for index in range(first_mtp + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{index}"
        for name, shape in _layer_shapes(config, dense=index < config["first_k_dense_replace"]):
            yield f"{prefix}.{name}.weight", shape
        if index >= config["first_k_dense_replace"]:
            bias = f"{prefix}.mlp.gate.e_score_correction_bias"
            yield bias, (config["n_routed_experts"],)
        if index >= first_mtp:
            yield f"{prefix}.embed_tokens.weight", (vocab, hidden)
            yield f"{prefix}.enorm.weight", (hidden,)
            yield f"{prefix}.hnorm.weight", (hidden,)
            yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
            yield f"{prefix}.shared_head.norm.weight", (hidden,)
            yield f"{prefix}.shared_head.head.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _layer_shapes(
    config: Mapping[str, Any], *, dense: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value, q_latent = (
        config["qk_nope_head_dim"],
        config["v_head_dim"],
        config["q_lora_rank"],
    )
    yield "input_layernorm", (hidden,)
    yield "post_attention_layernorm", (hidden,)
    if q_latent is None:
        yield "self_attn.q_proj", (heads * (nope + rope), hidden)
    else:
        yield "self_attn.q_a_proj", (q_latent, hidden)
        yield "self_attn.q_a_layernorm", (q_latent,)
        yield "self_attn.q_b_proj", (heads * (nope + rope), q_latent)
    yield "self_attn.kv_a_proj_with_mqa", (latent + rope, hidden)
    yield "self_attn.kv_a_layernorm", (latent,)
    yield "self_attn.kv_b_proj", (heads * (nope + value), latent)
    yield "self_attn.o_proj", (hidden, heads * value)
    widths = {"mlp": config["intermediate_size"]}
    if not dense:
        yield "mlp.gate", (config["n_routed_experts"], hidden)
        width = config["moe_intermediate_size"]
        widths = {f"mlp.experts.{expert}": width for expert in range(config["n_routed_experts"])}
        if config["n_shared_experts"]:
            widths["mlp.shared_experts"] = width * config["n_shared_experts"]
    for prefix, width in widths.items():
        yield f"{prefix}.gate_proj", (width, hidden)
        yield f"{prefix}.up_proj", (width, hidden)
        yield f"{prefix}.down_proj", (hidden, width)


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Invent float32 weights that keep activations in range and make routing matter."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config):
        noise = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = 0.1 * noise
        elif len(shape) == 1:
            tensors[name] = 1 + 0.2 * noise
        else:
            tensors[name] = noise / shape[-1] ** 0.5
    head = f"model.layers.{config['num_hidden_layers']}."
    for repeated, original in (
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("shared_head.head.weight", "lm_head.weight"),
    ):
        if head + repeated in tensors and original in tensors:
            tensors[head + repeated] = tensors[original].clone()
    return tensors


def to_fp8(
    tensors: Mapping[str, Tensor], block: int = 128, unquantized: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Quantise the matrices that DeepSeek quantises, and add their scales.

    Those whose name matches one of `unquantized`, a regular expression, become bfloat16.
    """
    quantised: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_projection = name.endswith(("_proj.weight", "_with_mqa.weight"))
        if any(re.search(pattern, name) for pattern in unquantized):
            quantised[name] = tensor.bfloat16()
        elif is_projection and "eh_proj" not in name:
            quantised[name], quantised[name + "_scale_inv"] = quantize_block(tensor, block)
        else:
            quantised[name] = tensor
    return quantised


def write_checkpoint(
    path: Path,
    config: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    fp8: bool = False,
    unquantized: Sequence[str] = (),
    num_files: int = 1,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write config.json and safetensors into `path`, and return it.

    With `fp8`, modules that `unquantized` names stay as they are, and config.json says so.
    """
    config = dict(config or TINY)
    tensors = dict(tensors if tensors is not None else random_tensors(config, seed))
    if fp8:
        tensors = to_fp8(tensors, unquantized=unquantized)
        config["quantization_config"] = {
            **({"modules_to_not_convert": [*unquantized]} if unquantized else {}),
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if num_files == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = dict(list(tensors.items())[number::num_files])
        weight_map.update(dict.fromkeys(part, file))
        save_file(part, path / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path
