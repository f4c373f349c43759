"""The names of DeepSeek-V3's `config.json`: which may say one thing only, and which change nothing.

What is in neither list and is not read is unknown: `unknown_fields` finds it, and whoever reads the
file tells it. The lists are checked, field by field, against the installed `transformers`
(`tests/engine/hf_config`).
"""

from collections.abc import Collection, Mapping
from typing import Final

from engine.hf_config.fields import Fields

OF_MASKS_AND_CACHES: Final[Mapping[str, tuple[object, ...]]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "sliding_window": (None,),
    "attention_chunk_size": (None,),
    "kv_sharing_modes": (None,),
    "per_layer_config": (None,),
    "compression_config": (None,),
}
"""What transformers' masks and caches would follow, in every architecture."""

SERVED_VALUES: Final[Mapping[str, tuple[object, ...]]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    # Not of transformers, which has one kind of routing; of the model's own first code.
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
    **OF_MASKS_AND_CACHES,
}
"""What each field may say; the first is what its absence means."""

ALIASES: Final[Mapping[str, str]] = {
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
"""Second names of fields, as transformers has them."""

READ: Final = frozenset(
    {
        "architectures",
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "eos_token_id",
        "bos_token_id",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "head_dim",
        "v_head_dim",
        "layer_types",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_interleave",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "intermediate_size",
        "first_k_dense_replace",
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
        "num_nextn_predict_layers",
        "quantization_config",
        *ALIASES,
    }
)
"""Fields that `DeepseekV3Config` or a check of it is made of."""

_TRAINING: Final = "is of training only"
_OUTPUTS: Final = "says which outputs transformers returns beside the logits"
_TASK: Final = "is of classifiers"
_RECORD: Final = "says where the checkpoint comes from"
_CHOICE: Final = "chooses an implementation within transformers"
_TEXT: Final = "is of texts, which the router handles"
_REQUEST: Final = "is said by each request"

WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "attention_dropout": _TRAINING,
    "initializer_range": _TRAINING,
    "aux_loss_alpha": _TRAINING,
    "router_aux_loss_coef": _TRAINING,
    "seq_aux": _TRAINING,
    "pretraining_tp": _TRAINING,
    "ep_size": _TRAINING,
    "chunk_size_feed_forward": "is not read by this architecture",
    "qk_head_dim": "is the sum of qk_nope_head_dim and qk_rope_head_dim, from which it is made",
    "use_cache": "KV is always kept",
    "dtype": "weights are converted to model.dtype",
    "torch_dtype": "weights are converted to model.dtype",
    "pad_token_id": "sequences are not padded",
    "output_router_logits": _OUTPUTS,
    "output_hidden_states": _OUTPUTS,
    "output_attentions": _OUTPUTS,
    "return_dict": _OUTPUTS,
    "tie_last_hidden_states": _OUTPUTS,
    "id2label": _TASK,
    "label2id": _TASK,
    "num_labels": _TASK,
    "problem_type": _TASK,
    "_name_or_path": _RECORD,
    "name_or_path": _RECORD,
    "_commit_hash": _RECORD,
    "transformers_version": _RECORD,
    "auto_map": _RECORD,
    "attn_implementation": _CHOICE,
    "_attn_implementation": _CHOICE,
    "_attn_implementation_autoset": _CHOICE,
    "experts_implementation": _CHOICE,
    "tokenizer_class": _TEXT,
    "temperature": _REQUEST,
    "top_p": _REQUEST,
    "top_k": _REQUEST,
    "do_sample": _REQUEST,
    "max_length": _REQUEST,
}
"""Fields that cannot change what the model computes, with the reason."""


def check_served(fields: Fields, served: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse what this server does not implement.

    Args:
        fields: of the whole `config.json`.
        served: what each field may say; the first is what its absence means.

    Raises:
        ConfigError: names the field and the value that is served.
    """
    for name, values in served.items():
        if name in fields and fields.get(name) not in values:
            raise fields.refuse(
                name, "not implemented", f"use a checkpoint with {name} = {values[0]!r}"
            )
    kinds = fields.get("layer_types")
    is_full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    if kinds is not None and not is_full:
        problem = "not implemented: every layer attends to all that precedes"
        raise fields.refuse("layer_types", problem, "use a checkpoint of 'full_attention' layers")


def check_alike(fields: Fields, name: str, expected: int, meaning: str) -> None:
    """Refuse a field that can only repeat others, and does not; its absence repeats them.

    Raises:
        ConfigError: names the field and what it would have to be.
    """
    value = fields.get(name) if name in fields else expected
    if isinstance(value, bool) or value != expected:
        raise fields.refuse(name, f"not implemented: {meaning}", f"{expected}, or leave it out")


def one_name_each(content: Mapping[str, object]) -> dict[str, object]:
    """Return the content with first names in place of second ones.

    Raises:
        ConfigError: both names stand there, with two values.
    """
    renamed = dict(content)
    for alias, name in ALIASES.items():
        if alias not in content:
            continue
        if name in content and content[name] != content[alias]:
            problem = f"{name} says {content[name]!r}, and both names mean the same"
            raise Fields(content).refuse(alias, problem, "leave one of the two")
        renamed[name] = renamed.pop(alias)
    return renamed


def differing_dtypes(fields: Fields) -> str:
    """Return the sentence about two names of one field that say different things; or nothing."""
    old, new = fields.get("torch_dtype"), fields.get("dtype")
    if old is None or new is None or old == new:
        return ""
    return (
        f"config.json says torch_dtype = {old} and dtype = {new}: weights are converted to "
        "model.dtype whatever they say"
    )


def unknown_fields(fields: Fields, *known: Collection[str]) -> list[str]:
    """Return the names that none of the lists has."""
    return sorted(set(fields).difference(*known))
