"""A configuration small enough to train in a test; every part of the real one is present."""

from tools.training.architecture import model_config


def tiny_config() -> dict[str, object]:
    """Return a config.json with two layers of width 32."""
    return {
        **model_config(),
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "moe_intermediate_size": 128,
    }
