"""Named model shapes, for measurements that need no checkpoint, and parts of a shape.

Two parts are known. Fewer layers of the full width, for a host whose memory is too small. A
*shard*: a smaller model that N ranks share, in which each rank holds what one of M ranks holds of
the full one, so that a rank's work can be measured where fewer GPUs are. The key idea of a shard:
heads and experts are divided so that the products of a rank and the rows of an expert keep their
size; what cannot be kept (how much of the traffic stays on the rank) is said by whoever reports.
"""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from engine.config import DeepseekV3Config, YarnConfig
from runtime.errors import ConfigError

DEEPSEEK_V3: Final = DeepseekV3Config(
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    max_position_embeddings=163840,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    yarn=YarnConfig(
        factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
    ),
    intermediate_size=18432,
    first_k_dense_replace=3,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=1,
    fp8_block_size=128,
)
"""DeepSeek-V3 and R1 (671B)."""

TINY: Final = DeepseekV3Config(
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    max_position_embeddings=8192,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=1024,
    first_k_dense_replace=1,
    moe_intermediate_size=128,
    n_routed_experts=64,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=1,
    fp8_block_size=128,
)
"""The same kinds of layers at a size that a CPU runs in milliseconds; FP8 blocks are whole."""

SHAPES: Final = MappingProxyType({"deepseek-v3": DEEPSEEK_V3, "tiny": TINY})


def read_shape(name: str) -> DeepseekV3Config:
    """Return the shape of that name, or of the checkpoint in the folder of that name.

    Raises:
        ConfigError: neither a name nor a folder with a readable `config.json`.
    """
    if name in SHAPES:
        return SHAPES[name]
    if not Path(name).is_dir():
        known = ", ".join(SHAPES)
        raise ConfigError(
            "model-shape", name, "is no shape and no folder", f"{known}, or a checkpoint folder"
        )
    return DeepseekV3Config.from_dir(name)


def with_layers(config: DeepseekV3Config, num_layers: int) -> DeepseekV3Config:
    """Return the model with fewer layers, dense and MoE in their proportion (rounded).

    Raises:
        ConfigError: more layers than the model has, or none.
    """
    have = config.num_hidden_layers
    if not 1 <= num_layers <= have:
        raise ConfigError("layers", num_layers, f"the model has {have}", f"1 to {have}")
    dense = round(config.first_k_dense_replace * num_layers / have)
    return replace(config, num_hidden_layers=num_layers, first_k_dense_replace=dense)


def tensor_shard(config: DeepseekV3Config, *, ranks: int, of: int) -> DeepseekV3Config:
    """Return a model of whose `ranks` tensor-parallel ranks each holds what one of `of` holds.

    The ranks run the same tokens, so for the same batch an expert gets as many rows if a token
    chooses fewer experts, in proportion.

    Raises:
        ConfigError: sizes that cannot be divided.
    """
    share = _Share(ranks, of)
    groups = max(share.take("n_group", config.n_group), 1)
    return replace(
        config,
        num_attention_heads=share.take("num_attention_heads", config.num_attention_heads),
        intermediate_size=share.take("intermediate_size", config.intermediate_size),
        n_routed_experts=share.take("n_routed_experts", config.n_routed_experts),
        num_experts_per_tok=share.take("num_experts_per_tok", config.num_experts_per_tok),
        n_group=groups,
        topk_group=max(1, config.topk_group * ranks // of),
    )


def expert_shard(config: DeepseekV3Config, *, ranks: int, of: int) -> DeepseekV3Config:
    """Return a model of whose `ranks` data-parallel ranks each holds what one of `of` holds.

    Each rank has its own tokens, and fewer ranks send fewer of them; so a token chooses as many
    experts among fewer, and an expert gets as many rows for the same tokens a rank.

    Raises:
        ConfigError: sizes that cannot be divided.
    """
    share = _Share(ranks, of)
    groups = share.take("n_group", config.n_group)
    experts = share.take("n_routed_experts", config.n_routed_experts)
    return replace(
        config,
        n_routed_experts=experts,
        n_group=groups,
        topk_group=min(config.topk_group, groups),
    )


class _Share:
    """`ranks` of `of` parts of a number."""

    def __init__(self, ranks: int, of: int) -> None:
        if not 1 <= ranks <= of:
            raise ConfigError("shard-of", of, f"fewer than the {ranks} ranks here", f"{ranks}")
        self._ranks, self._of = ranks, of

    def take(self, name: str, size: int) -> int:
        if size % self._of:
            problem = f"{name} = {size} is not a multiple of it"
            fitting = max(n for n in range(1, self._of) if size % n == 0)
            raise ConfigError("shard-of", self._of, problem, f"{fitting}")
        return size // self._of * self._ranks
