"""The hyperparameters of a DeepSeek-V3-class model, as its checkpoint states them.

Field names are those of the Hugging Face `config.json`, which are those of the paper. This module
only reads and checks; it knows nothing about devices or ranks. The key idea: whatever the engine
does not implement is refused here, by field and value, so that the model code never has to ask.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runtime.errors import ConfigError

ARCHITECTURE: Final = "DeepseekV3ForCausalLM"
MODEL_TYPE: Final = "deepseek_v3"

# Fields for which only one value is implemented, with that value (also what absence means).
_ONLY_VALUE: Final[Mapping[str, object]] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """Context extension by YaRN (https://arxiv.org/abs/2309.00071), as in `rope_scaling`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One checkpoint's hyperparameters; see `from_dir` and `from_hf`.

    `fp8_block_size` is the edge of a quantisation block if the checkpoint may hold FP8 weights,
    else 0. `num_nextn_predict_layers` counts MTP layers. `eos_token_ids` may be empty.
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

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_routing(self)

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

    def num_kv_layers(self, *, with_mtp: bool = False) -> int:
        """Layers that the KV pool must hold; an MTP layer has its own, after the others."""
        return self.num_hidden_layers + (self.num_nextn_predict_layers if with_mtp else 0)

    @classmethod
    def from_dir(cls, path: str | Path) -> "ModelConfig":
        """Read `config.json` of a checkpoint folder.

        Raises:
            ConfigError: no such file, not JSON, another architecture, or an unsupported value.
        """
        file = Path(path) / "config.json"
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                "model.path",
                str(path),
                f"cannot read {file.name} ({error.strerror})",
                "point it to a checkpoint folder that holds config.json and *.safetensors",
            ) from error
        except ValueError as error:
            raise ConfigError(
                "model.path", str(path), f"{file.name} is not JSON: {error}", "download it again"
            ) from error
        if not isinstance(fields, dict):
            raise ConfigError(
                "model.path", str(path), f"{file.name} is not an object", "download it again"
            )
        return cls.from_hf(fields)

    @classmethod
    def from_hf(cls, fields: Mapping[str, object]) -> "ModelConfig":
        """Build from the content of a Hugging Face `config.json`.

        Both spellings of the rotary settings are understood: `rope_theta` with `rope_scaling`, and
        `rope_parameters`.

        Raises:
            ConfigError: another architecture, a missing field, or an unsupported value.
        """
        read = _Reader(fields)
        read.check_architecture()
        rope = read.rope()
        return cls(
            vocab_size=read.integer("vocab_size"),
            hidden_size=read.integer("hidden_size"),
            num_hidden_layers=read.integer("num_hidden_layers"),
            num_attention_heads=read.integer("num_attention_heads"),
            max_position_embeddings=read.integer("max_position_embeddings"),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
            eos_token_ids=read.token_ids("eos_token_id"),
            bos_token_id=read.optional_integer("bos_token_id"),
            q_lora_rank=read.optional_integer("q_lora_rank"),
            kv_lora_rank=read.integer("kv_lora_rank"),
            qk_nope_head_dim=read.integer("qk_nope_head_dim"),
            qk_rope_head_dim=read.integer("qk_rope_head_dim"),
            v_head_dim=read.integer("v_head_dim"),
            rope_theta=rope.number("rope_theta", read.number("rope_theta", 10000.0)),
            rope_interleave=read.flag("rope_interleave", True),
            yarn=rope.yarn(),
            intermediate_size=read.integer("intermediate_size"),
            first_k_dense_replace=read.integer("first_k_dense_replace", 0),
            moe_intermediate_size=read.integer("moe_intermediate_size"),
            n_routed_experts=read.integer("n_routed_experts"),
            n_shared_experts=read.integer("n_shared_experts", 1),
            num_experts_per_tok=read.integer("num_experts_per_tok"),
            n_group=read.integer("n_group", 1),
            topk_group=read.integer("topk_group", 1),
            norm_topk_prob=read.flag("norm_topk_prob", True),
            routed_scaling_factor=read.number("routed_scaling_factor", 1.0),
            num_nextn_predict_layers=read.integer("num_nextn_predict_layers", 0),
            fp8_block_size=read.fp8_block_size(),
        )


class _Reader:
    """Typed access to a JSON object; a null counts as absent."""

    def __init__(self, fields: Mapping[str, object], prefix: str = "") -> None:
        self._fields = fields
        self._prefix = prefix

    def check_architecture(self) -> None:
        """Refuse models whose arithmetic is another."""
        architectures = self._fields.get("architectures") or [ARCHITECTURE]
        if architectures != [ARCHITECTURE]:
            named = architectures[0] if isinstance(architectures, list) else architectures
            raise ConfigError(
                "architectures",
                named,
                "this server knows one architecture",
                f"use a {ARCHITECTURE} checkpoint",
            )
        model_type = self._fields.get("model_type", MODEL_TYPE)
        if model_type != MODEL_TYPE:
            raise ConfigError(
                "model_type", model_type, "another model type", f"use a {MODEL_TYPE} checkpoint"
            )
        for name, only in _ONLY_VALUE.items():
            value = self._fields.get(name)
            if value is not None and value != only:
                raise ConfigError(
                    name, value, "not implemented", f"use a checkpoint with {name} = {only!r}"
                )

    def number(self, name: str, default: float | None = None) -> float:
        """Return a float; without a default the field is required."""
        value = self._fields.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(
                self._prefix + name, value, "a number is needed", "correct the model's config.json"
            )
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an int; without a default the field is required."""
        value = self.number(name, default)
        if value != int(value):
            raise ConfigError(
                self._prefix + name,
                value,
                "an integer is needed",
                "correct the model's config.json",
            )
        return int(value)

    def optional_integer(self, name: str) -> int | None:
        """Return an int, or None if absent."""
        return None if self._fields.get(name) is None else self.integer(name)

    def flag(self, name: str, default: bool) -> bool:
        """Return a bool."""
        value = self._fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(
                self._prefix + name, value, "true or false is needed", "correct config.json"
            )
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return one id, a list of ids, or nothing as a tuple."""
        value = self._fields.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) for item in ids):
            raise ConfigError(name, value, "token ids are needed", "correct config.json")
        return tuple(ids)

    def section(self, name: str) -> "_Reader":
        """Return a nested object, empty if absent."""
        value = self._fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(name, value, "an object is needed", "correct config.json")
        return _Reader(value or {}, f"{self._prefix}{name}.")

    def rope(self) -> "_Reader":
        """Return the object that holds the rotary settings, in whichever spelling."""
        return self.section("rope_parameters" if "rope_parameters" in self._fields else _SCALING)

    def yarn(self) -> YarnConfig | None:
        """Return the context extension that this rotary object states."""
        kind = self._fields.get("rope_type", self._fields.get("type", "default"))
        if kind == "default":
            return None
        if kind != "yarn":
            raise ConfigError(
                self._prefix + "rope_type", kind, "not implemented", "use 'yarn' or none"
            )
        return YarnConfig(
            factor=self.number("factor"),
            original_max_position_embeddings=self.integer("original_max_position_embeddings"),
            beta_fast=self.number("beta_fast", 32.0),
            beta_slow=self.number("beta_slow", 1.0),
            mscale=self.number("mscale", 0.0),
            mscale_all_dim=self.number("mscale_all_dim", 0.0),
        )

    def fp8_block_size(self) -> int:
        """Return the edge of a quantisation block, 0 for an unquantised checkpoint."""
        if self._fields.get("quantization_config") is None:
            return 0
        section = self.section("quantization_config")
        method = section._fields.get("quant_method")
        block = section._fields.get("weight_block_size")
        square = isinstance(block, list) and len(block) == 2 and block[0] == block[1]
        if method != "fp8" or not square:
            raise ConfigError(
                "quantization_config",
                dict(section._fields),
                "only block-wise FP8 is implemented",
                "use quant_method 'fp8' with weight_block_size [128, 128]",
            )
        assert isinstance(block, list)
        return int(block[0])


_SCALING: Final = "rope_scaling"
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


def _check_sizes(config: ModelConfig) -> None:
    for name in _POSITIVE:
        if getattr(config, name) < 1:
            raise ConfigError(name, getattr(config, name), "must be positive", "correct it")
    if config.qk_rope_head_dim < 2 or config.qk_rope_head_dim % 2:
        raise ConfigError(
            "qk_rope_head_dim",
            config.qk_rope_head_dim,
            "rotation works on pairs",
            "use a positive even number",
        )


def _check_routing(config: ModelConfig) -> None:
    if config.num_moe_layers == 0 and config.num_nextn_predict_layers == 0:
        return
    experts, groups = config.n_routed_experts, config.n_group
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
