"""The hyperparameters of a DeepSeek-V3-class model, as its checkpoint states them.

Field names are those of the Hugging Face `config.json`, which are those of the paper. This module
only reads and checks; it knows nothing about devices or ranks. The key idea: whatever the engine
does not implement is refused here, by field and value, so that the model code never has to ask.
What each field of the file means, absent or null, is in `engine.hf_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypedDict

from engine.attention.kv_spec import KVSpec
from engine.hf_config.content import read_content
from engine.hf_config.fields import Fields
from engine.hf_config.known import (
    READ,
    SERVED_VALUES,
    WITHOUT_EFFECT,
    check_alike,
    check_served,
    differing_dtypes,
    one_name_each,
    unknown_fields,
)
from engine.hf_config.quantization import read_quantization
from engine.hf_config.rope import overruled_rope, read_rope
from engine.yarn import YarnConfig
from runtime.errors import ConfigError

__all__ = ["ARCHITECTURE", "MODEL_TYPE", "DeepseekV3Config", "YarnConfig"]

ARCHITECTURE: Final = "DeepseekV3ForCausalLM"
MODEL_TYPE: Final = "deepseek_v3"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3Config:
    """One checkpoint's hyperparameters; see `from_dir` and `from_hf`.

    `fp8_block_size` is the edge of a quantisation block if the checkpoint may hold FP8 weights,
    else 0, and `unquantized_modules` are the patterns of modules that it leaves as they are (see
    `engine.hf_config.quantization`). `num_nextn_predict_layers` counts MTP layers. `eos_token_ids`
    may be empty. `remarks` are sentences about the file for people: what it leaves out and tensors
    do not show, and what in it has no effect.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    # mla
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    # rope
    rope_theta: float = 10000.0
    rope_interleave: bool = True
    yarn: YarnConfig | None = None
    # dense feed-forward
    intermediate_size: int
    first_k_dense_replace: int
    # moe
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    # multi-token prediction
    num_nextn_predict_layers: int = 0
    # storage
    fp8_block_size: int = 0
    unquantized_modules: tuple[str, ...] = ()
    remarks: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_rope(self)
        _check_routing(self)

    @property
    def architecture(self) -> str:
        """See `CommonConfig`."""
        return ARCHITECTURE

    @property
    def experts(self) -> "DeepseekV3Config":
        """See `CommonConfig`."""
        return self

    @property
    def kv_spec(self) -> KVSpec:
        """One latent that all heads share, so every rank keeps it whole."""
        return KVSpec.shared(self.latent_dim)

    @property
    def latent_dim(self) -> int:
        """Numbers that a token leaves in the KV cache of one layer: kv_c and k_pe."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of a decompressed query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts, MTP layers not counted."""
        return max(0, self.num_hidden_layers - self.first_k_dense_replace)

    def expert_layers(self, *, with_mtp: bool = False) -> range:
        """See `CommonConfig`; MTP layers have experts too."""
        end = self.num_kv_layers(with_mtp=with_mtp)
        return range(min(self.first_k_dense_replace, end), end)

    def num_kv_layers(self, *, with_mtp: bool = False) -> int:
        """Layers that the KV pool must hold; an MTP layer has its own, after the others."""
        return self.num_hidden_layers + (self.num_nextn_predict_layers if with_mtp else 0)

    def tp_sizes(self, *, whole_experts: bool) -> dict[str, int]:
        """See `CommonConfig`."""
        sizes = {"num_attention_heads": self.num_attention_heads}
        if self.first_k_dense_replace > 0:
            sizes["intermediate_size"] = self.intermediate_size
        if self.num_moe_layers and self.n_shared_experts:
            sizes["moe_intermediate_size x n_shared_experts"] = (
                self.moe_intermediate_size * self.n_shared_experts
            )
        if self.num_moe_layers and not whole_experts:
            sizes["moe_intermediate_size"] = self.moe_intermediate_size
        return sizes

    def describe(self) -> dict[str, str]:
        """See `CommonConfig`."""
        return {
            "layers": f"{self.num_hidden_layers} ({self.first_k_dense_replace} dense), "
            f"{self.num_nextn_predict_layers} MTP",
            "attention": f"{self.num_attention_heads} heads, latent {self.latent_dim}",
            "experts": f"{self.n_routed_experts} routed, top {self.num_experts_per_tok}, "
            f"{self.n_shared_experts} shared, {self.n_group} groups",
        }

    @classmethod
    def from_dir(cls, path: str | Path) -> "DeepseekV3Config":
        """Read `config.json` of a checkpoint folder.

        Raises:
            ConfigError: no such file, not JSON, another architecture, or an unsupported value.
        """
        return cls.from_hf(read_content(path))

    @classmethod
    def from_hf(cls, content: Mapping[str, object]) -> "DeepseekV3Config":
        """Build from the content of a Hugging Face `config.json`.

        Sizes have to be there. Everything else may be absent, and then is what it is for
        `transformers`.

        Raises:
            ConfigError: another architecture, a size that is absent, or an unsupported value.
        """
        fields = Fields(one_name_each(content))
        _check_architecture(fields)
        check_served(fields, SERVED_VALUES)
        context = fields.integer("max_position_embeddings")
        theta, yarn, idle = read_rope(fields, context)
        block_size, unquantized, idle_formats = read_quantization(fields)
        sizes = {name: fields.integer(name) for name in _SIZES}
        if "q_lora_rank" not in fields:
            raise fields.refuse("q_lora_rank", "is absent", "the rank, or null for no latent")
        if fields.get("num_key_value_heads") is not None:
            meaning = "every head has a key and a value of its own"
            check_alike(fields, "num_key_value_heads", sizes["num_attention_heads"], meaning)
        check_alike(fields, "head_dim", sizes["qk_rope_head_dim"], "it is qk_rope_head_dim")
        behaviour = _read_behaviour(fields)
        unknown = unknown_fields(fields, READ, SERVED_VALUES, WITHOUT_EFFECT)
        idle += [*idle_formats, *unknown]
        try:
            return cls(
                **sizes,
                **behaviour,
                max_position_embeddings=context,
                q_lora_rank=fields.optional_integer("q_lora_rank"),
                rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
                tie_word_embeddings=fields.flag("tie_word_embeddings", False),
                eos_token_ids=fields.token_ids("eos_token_id"),
                bos_token_id=fields.optional_integer("bos_token_id"),
                rope_theta=theta,
                rope_interleave=fields.flag("rope_interleave", True, null=False),
                yarn=yarn,
                fp8_block_size=block_size,
                unquantized_modules=unquantized,
                remarks=_remarks(fields, idle),
            )
        except ConfigError as error:
            absent = _left_out(fields)
            if not absent:
                raise
            problem, fix = f"{error.problem} ({absent})", f"{error.fix}, or say what is left out"
            raise ConfigError(error.path, error.value, problem, fix) from error


_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
)
"""Without these a file is broken: their defaults would be the sizes of one model, the 671B."""

_TOLD: Final = (
    "rms_norm_eps",
    "rope_theta",
    "first_k_dense_replace",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
)
"""Whose absence is told: tensors do not show a wrong one, and published checkpoints say them."""

_POSITIVE: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "n_group",
)
_NOT_NEGATIVE: Final = (
    "rms_norm_eps",
    "first_k_dense_replace",
    "n_routed_experts",
    "n_shared_experts",
    "num_nextn_predict_layers",
)


class _Behaviour(TypedDict):
    first_k_dense_replace: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_nextn_predict_layers: int


def _read_behaviour(fields: Fields) -> _Behaviour:
    """Read what is not proved by shapes; defaults are those of transformers' DeepseekV3Config."""
    num_mtp = "num_nextn_predict_layers"
    is_null = num_mtp in fields and fields.get(num_mtp) is None
    return _Behaviour(
        first_k_dense_replace=fields.integer("first_k_dense_replace", 3),
        n_shared_experts=fields.integer("n_shared_experts", 1),
        num_experts_per_tok=fields.integer("num_experts_per_tok", 8),
        n_group=fields.integer("n_group", 8),
        topk_group=fields.integer("topk_group", 4),
        norm_topk_prob=fields.flag("norm_topk_prob", True, null=False),
        routed_scaling_factor=fields.number("routed_scaling_factor", 2.5),
        num_nextn_predict_layers=0 if is_null else fields.integer(num_mtp, 1),
    )


def _left_out(fields: Fields) -> str:
    """Say which fields are absent that matter; empty if none is."""
    absent = [f"{name} = {fields.defaults[name]}" for name in _TOLD if name in fields.defaults]
    return f"config.json leaves out {', '.join(absent)}: transformers' defaults" if absent else ""


def _remarks(fields: Fields, idle: list[str]) -> tuple[str, ...]:
    absent = _left_out(fields)
    unread = f"config.json says {', '.join(idle)}: not read here, nor by transformers' DeepseekV3"
    told = (absent, unread if idle else "", overruled_rope(fields), differing_dtypes(fields))
    return tuple(filter(None, told))


def _check_architecture(fields: Fields) -> None:
    """Refuse models whose arithmetic is another."""
    architectures, model_type = fields.get("architectures"), fields.get("model_type")
    if architectures and architectures != [ARCHITECTURE]:
        named = architectures[0] if isinstance(architectures, list) else architectures
        problem = "another architecture"
        raise ConfigError("architectures", named, problem, f"use a {ARCHITECTURE} checkpoint")
    if model_type != MODEL_TYPE and not (architectures and "model_type" not in fields):
        problem = "another model type"
        raise ConfigError("model_type", model_type, problem, f"use a {MODEL_TYPE} checkpoint")


def _check_sizes(config: DeepseekV3Config) -> None:
    positive = _POSITIVE if config.q_lora_rank is None else (*_POSITIVE, "q_lora_rank")
    for least, names in ((1, positive), (0, _NOT_NEGATIVE)):
        for name in names:
            if getattr(config, name) < least:
                problem = "must be positive" if least else "must not be negative"
                raise ConfigError(name, getattr(config, name), problem, "correct it")
    if config.qk_rope_head_dim < 2 or config.qk_rope_head_dim % 2:
        raise ConfigError(
            "qk_rope_head_dim",
            config.qk_rope_head_dim,
            "rotation works on pairs",
            "use a positive even number",
        )


def _check_rope(config: DeepseekV3Config) -> None:
    yarn = config.yarn
    if config.rope_theta <= 0 or (yarn is not None and config.rope_theta == 1):
        fix = "a base above 1, such as 10000"
        raise ConfigError("rope_theta", config.rope_theta, "makes no frequencies", fix)
    if yarn is None:
        return
    for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
        value = getattr(yarn, name)
        if value <= 0:
            raise ConfigError(f"rope_scaling.{name}", value, "must be positive", "correct it")


def _check_routing(config: DeepseekV3Config) -> None:
    if config.num_moe_layers == 0 and config.num_nextn_predict_layers == 0:
        return
    experts, groups = config.n_routed_experts, config.n_group
    if config.moe_intermediate_size < 1:
        width = config.moe_intermediate_size
        raise ConfigError("moe_intermediate_size", width, "must be positive", "correct it")
    if experts < 1 or experts % groups:
        raise ConfigError(
            "n_routed_experts", experts, f"not a multiple of n_group = {groups}", "correct it"
        )
    if groups > 1 and experts // groups < 2:
        raise ConfigError(
            "n_group", groups, "a group is scored by its two best experts", "use fewer groups"
        )
    if not 1 <= config.topk_group <= groups:
        raise ConfigError("topk_group", config.topk_group, f"not in 1..{groups}", "correct it")
    reachable = config.topk_group * (experts // groups)
    if not 1 <= config.num_experts_per_tok <= reachable:
        raise ConfigError(
            "num_experts_per_tok",
            config.num_experts_per_tok,
            f"{reachable} experts are reachable through topk_group groups",
            "lower it or raise topk_group",
        )
