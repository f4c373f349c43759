"""The hyperparameters of a Llama-shaped model, as its checkpoint states them.

Field names are those of the Hugging Face `config.json`. What the engine does not implement is
refused here, by field and value, so that the model code never has to ask.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from engine.attention.kv_spec import KVSpec
from engine.hf_config.fields import Fields
from engine.hf_config.known import check_served, differing_dtypes, unknown_fields
from engine.hf_config.llama import (
    READ,
    SERVED_VALUES,
    WITHOUT_EFFECT,
    Llama3Scaling,
    read_llama_rope,
)
from engine.hf_config.rope import overruled_rope
from runtime.errors import ConfigError

ARCHITECTURE: Final = "LlamaForCausalLM"
MODEL_TYPE: Final = "llama"

_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
"""Without these a file is broken: their defaults would be the sizes of one model, the 7B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """One checkpoint's hyperparameters; see `from_hf`. `CommonConfig` has what is not said here.

    Attributes:
        num_key_value_heads: that the query heads share, equally many each.
        head_dim: numbers of one head.
        rope_scaling: of the frequencies; None for plain ones.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    remarks: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in (*_SIZES, "num_key_value_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be positive", "correct it")
        heads, keys = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % heads:
            fix = "a multiple of num_attention_heads"
            raise ConfigError("hidden_size", self.hidden_size, f"{heads} heads divide it", fix)
        if heads % keys:
            fix = f"a divisor of num_attention_heads = {heads}"
            raise ConfigError("num_key_value_heads", keys, "heads share them equally", fix)
        if self.head_dim % 2:
            fix = "an even number"
            raise ConfigError("head_dim", self.head_dim, "rotation works on pairs", fix)
        if self.rms_norm_eps < 0:
            raise ConfigError("rms_norm_eps", self.rms_norm_eps, "must not be negative", "1e-5")
        if self.rope_theta <= 0:
            fix = "a base above 1, such as 10000"
            raise ConfigError("rope_theta", self.rope_theta, "makes no frequencies", fix)

    @property
    def architecture(self) -> str:
        """See `CommonConfig`."""
        return ARCHITECTURE

    @property
    def num_nextn_predict_layers(self) -> int:
        """See `CommonConfig`."""
        return 0

    @property
    def fp8_block_size(self) -> int:
        """See `CommonConfig`."""
        return 0

    @property
    def experts(self) -> None:
        """See `CommonConfig`."""
        return

    @property
    def kv_spec(self) -> KVSpec:
        """Each key-value head's key and value, on the ranks that have the head."""
        heads, width = self.num_key_value_heads, 2 * self.head_dim
        return KVSpec(num_heads=heads, head_width=width, is_split=True)

    def expert_layers(self, *, with_mtp: bool = False) -> range:
        """See `CommonConfig`; there are none."""
        return range(0)

    def num_kv_layers(self, *, with_mtp: bool = False) -> int:
        """See `CommonConfig`."""
        assert not with_mtp, "there are no MTP layers"
        return self.num_hidden_layers

    def tp_sizes(self, *, whole_experts: bool) -> dict[str, int]:
        """See `CommonConfig`."""
        return {
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "intermediate_size": self.intermediate_size,
        }

    def describe(self) -> dict[str, str]:
        """See `CommonConfig`."""
        heads = f"{self.num_attention_heads} heads of {self.head_dim}"
        return {
            "layers": f"{self.num_hidden_layers}, dense",
            "attention": f"{heads}, {self.num_key_value_heads} for keys and values",
        }

    @classmethod
    def from_hf(cls, content: Mapping[str, object]) -> "LlamaConfig":
        """Build from the content of a Hugging Face `config.json`.

        Sizes have to be there. Everything else may be absent, and then is what it is for
        `transformers`.

        Raises:
            ConfigError: another architecture, a size that is absent, or an unsupported value.
        """
        fields = Fields(content)
        _check_architecture(fields)
        check_served(fields, SERVED_VALUES)
        if fields.section("quantization_config"):
            fix = "a checkpoint in bfloat16 or float32"
            problem = f"{ARCHITECTURE} is served unquantised only"
            raise fields.refuse("quantization_config", problem, fix)
        sizes = {name: fields.integer(name) for name in _SIZES}
        theta, scaling, idle = read_llama_rope(fields, sizes["max_position_embeddings"])
        heads = sizes["num_attention_heads"]
        keys, width = (fields.optional_integer(n) for n in ("num_key_value_heads", "head_dim"))
        return cls(
            **sizes,
            num_key_value_heads=heads if keys is None else keys,
            head_dim=sizes["hidden_size"] // max(heads, 1) if width is None else width,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            rope_theta=theta,
            rope_scaling=scaling,
            eos_token_ids=fields.token_ids("eos_token_id"),
            bos_token_id=fields.optional_integer("bos_token_id"),
            remarks=_remarks(fields, idle),
        )


def _check_architecture(fields: Fields) -> None:
    """Refuse models whose arithmetic is another."""
    architectures, model_type = fields.get("architectures"), fields.get("model_type")
    if architectures and architectures != [ARCHITECTURE]:
        fix = f"use a {ARCHITECTURE} checkpoint"
        raise ConfigError("architectures", architectures, "another architecture", fix)
    if model_type != MODEL_TYPE and not (architectures and "model_type" not in fields):
        fix = f"use a {MODEL_TYPE} checkpoint"
        raise ConfigError("model_type", model_type, "another model type", fix)


def _remarks(fields: Fields, idle: list[str]) -> tuple[str, ...]:
    told = [f"{name} = {fields.defaults[name]}" for name in _TOLD if name in fields.defaults]
    absent = f"config.json leaves out {', '.join(told)}: transformers' defaults" if told else ""
    idle = [*idle, *unknown_fields(fields, READ, SERVED_VALUES, WITHOUT_EFFECT)]
    unread = f"config.json says {', '.join(idle)}: not read here, nor by transformers' Llama"
    remarks = (absent, unread if idle else "", overruled_rope(fields), differing_dtypes(fields))
    return tuple(filter(None, remarks))


_TOLD: Final = ("rms_norm_eps", "rope_theta")
"""Whose absence is told: tensors do not show a wrong one, and published checkpoints say them."""
