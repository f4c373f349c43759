"""The architecture of the bundled model: one page of numbers, as `config.json` spells them.

It is DeepSeek-V3 made narrow. What must stay as in the full model stays: the latent of 512 + 64
numbers per token, heads of 128 + 64, sigmoid routing limited to groups and steered by a bias, a
shared expert, a dense layer first, one multi-token-prediction layer, FP8 in blocks of 128 x 128.
Heads, experts and vocabulary divide by 8, so every parallel size up to 8 runs it.
"""

from typing import Final

CONTEXT: Final = 4096
BOS_ID: Final = 0
EOS_ID: Final = 1
PAD_ID: Final = 2


def model_config() -> dict[str, object]:
    """Return the content of `config.json`, with a fresh dict at every call."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 5,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        **_attention(),
        **_experts(),
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    }


def _attention() -> dict[str, object]:
    return {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000,
        "rope_scaling": None,
    }


def _experts() -> dict[str, object]:
    return {
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
