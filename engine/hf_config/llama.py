"""The names of Llama's `config.json`, and its rotary settings, as `transformers` reads them.

What may say one thing only, what is read, and what leaves the model alone; the lists are checked,
field by field, against the installed `transformers` (`tests/engine/hf_config`). Rotary settings are
those of `modeling_rope_utils.py` of transformers 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from engine.hf_config.fields import Fields
from engine.hf_config.known import OF_MASKS_AND_CACHES
from engine.hf_config.known import WITHOUT_EFFECT as OF_DEEPSEEK
from engine.hf_config.rope import RopeScaling, naming, read_settings

SERVED_VALUES: Final[Mapping[str, tuple[object, ...]]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    **OF_MASKS_AND_CACHES,
}
"""What each field may say; the first is what its absence means."""

READ: Final = frozenset(
    {
        "architectures",
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "eos_token_id",
        "bos_token_id",
        "layer_types",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "quantization_config",
    }
)
"""Fields that `LlamaConfig` or a check of it is made of."""

_OF_EXPERTS: Final = frozenset(
    {
        "aux_loss_alpha",
        "router_aux_loss_coef",
        "seq_aux",
        "ep_size",
        "qk_head_dim",
        "output_router_logits",
        "experts_implementation",
    }
)
WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    name: reason for name, reason in OF_DEEPSEEK.items() if name not in _OF_EXPERTS
}
"""Fields that cannot change what the model computes, with the reason."""

_TRAINED: Final = "original_max_position_embeddings"
_LLAMA3: Final = RopeScaling(
    kind="llama3",
    settings=frozenset({"factor", "low_freq_factor", "high_freq_factor", _TRAINED}),
    fix="'llama3' or 'default'",
    no_partial=("not implemented: all of a head is rotated", "1.0"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """How frequencies are slowed for longer contexts; `engine.model.llama` does it.

    Attributes:
        factor: by which the slowest pairs are slowed.
        low_freq_factor: a pair that turns less often over the trained context is slowed wholly.
        high_freq_factor: one that turns more often is kept.
        original_max_position_embeddings: the trained context, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def read_llama_rope(
    fields: Fields, max_position_embeddings: int
) -> tuple[float, Llama3Scaling | None, list[str]]:
    """Read base and scaling.

    Args:
        fields: of the whole `config.json`.
        max_position_embeddings: the trained context, if the settings do not say it.

    Returns:
        rope_theta, the scaling if there is one, and the paths of settings without effect.

    Raises:
        ConfigError: a setting that is malformed, unknown or not implemented.
    """
    theta, rope, idle = read_settings(fields, _LLAMA3)
    if rope is None:
        return theta, None, idle
    with naming(_LLAMA3.kind):
        return theta, _read_scaling(fields, rope, max_position_embeddings), idle


def _read_scaling(fields: Fields, rope: Fields, max_position_embeddings: int) -> Llama3Scaling:
    place = fields if _TRAINED in fields else rope
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=place.integer(_TRAINED, max_position_embeddings),
    )
    if scaling.factor < 1:
        raise rope.refuse("factor", "slows frequencies", "1 or more")
    if scaling.low_freq_factor <= 0:
        raise rope.refuse("low_freq_factor", "must be positive", "1.0")
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        fix = f"more than low_freq_factor = {scaling.low_freq_factor:g}"
        raise rope.refuse("high_freq_factor", "no pairs lie between", fix)
    if scaling.original_max_position_embeddings < 1:
        raise place.refuse(_TRAINED, "must be positive", "the trained context in tokens")
    return scaling
