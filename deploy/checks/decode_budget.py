"""What fits on a rank of a decode instance: weights, buffers, graphs, and the KV that remains.

Pure arithmetic over a model's shape and a few numbers, so that a cluster of 72 GPUs can be checked
on a laptop, before anything starts. The key idea: a decode rank holds everything but the routed
experts whole, and of those P / R slots; what is left of its memory is KV, and decides how many
requests it can attend to. Sizes that a library decides are restated in `deep_ep_shape`; the
figures below that are estimates say so.
"""

from dataclasses import dataclass, replace
from typing import Final

from engine.config import DeepseekV3Config
from engine.parallel.deep_ep_shape import LowLatencyShape
from engine.parallel.nvlink.shape import NvlinkShape
from runtime.errors import ConfigError

H200_BYTES: Final = 149_200_000_000
"""139 GiB: what an H200 reports as its memory."""

CONTEXT_BYTES: Final = 2 * 2**30
"""Estimate: CUDA context, loaded kernels, collectives' and DeepEP's own workspaces."""

GRAPH_NODE_BYTES: Final = 16 * 2**10
"""Estimate: device memory of one kernel of an instantiated CUDA graph."""

GRAPH_NODES_PER_LAYER: Final = 40
"""Estimate: kernels of a decode layer with experts, transfers included."""

ALLOCATOR_SLACK: Final = 0.02
"""Estimate: share of the device that the caching allocator cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Weights of one rank with data-parallel attention, FP8 with a float32 scale per block.

    Attributes:
        attention: projections and norms, without the up-projection of the latents.
        up_projection: that of the latents, in bfloat16, as the absorbed form multiplies it.
        up_projection_source: the same in FP8, as loaded; kept for decompressed steps.
        dense: feed-forward layers without experts.
        shared_experts: whole.
        gates: of the routed experts.
        routed_experts: this rank's slots.
        embedding: with the head, in bfloat16.
        mtp: projection of the multi-token-prediction layers (their other parts are above).
    """

    attention: int
    up_projection: int
    up_projection_source: int
    dense: int
    shared_experts: int
    gates: int
    routed_experts: int
    embedding: int
    mtp: int

    @property
    def least(self) -> int:
        """Bytes that a decode step reads from."""
        return (
            self.attention
            + self.up_projection
            + self.dense
            + self.shared_experts
            + self.gates
            + self.routed_experts
            + self.embedding
            + self.mtp
        )

    @property
    def total(self) -> int:
        """Bytes that the rank holds."""
        return self.least + self.up_projection_source


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """What is asked of each rank of a decode instance.

    Attributes:
        num_ranks: R.
        num_redundant_experts: slots beyond one per routed expert.
        max_tokens_per_rank: the constant of low-latency dispatch.
        max_num_seqs: requests of a step and rank.
        num_speculative_tokens: drafts per request, of the largest step.
        is_adaptive: drafts are chosen before each step, and smaller ones may have more.
        by_nvlink: tokens travel by our own exchange, not by low-latency dispatch.
        block_size: tokens per KV block.
        latent_bytes: of one token and layer in the KV pool, 1152 in bfloat16.
        num_graphs: steps that are captured: batch buckets, and numbers of drafts of each.
        moves_experts: experts move between ranks while they decode, by way of two boxes.
        device_bytes: memory of the GPU.
    """

    num_ranks: int
    num_redundant_experts: int = 0
    max_tokens_per_rank: int = 128
    max_num_seqs: int = 128
    num_speculative_tokens: int = 0
    is_adaptive: bool = False
    by_nvlink: bool = False
    block_size: int = 64
    latent_bytes: int = 1152
    num_graphs: int = 20
    moves_experts: bool = False
    device_bytes: int = H200_BYTES

    @property
    def with_mtp(self) -> bool:
        """Whether the multi-token-prediction layers are built."""
        return self.is_adaptive or self.num_speculative_tokens > 0

    @property
    def tokens_per_step(self) -> int:
        """Most tokens that a rank brings to a step: each request's last token and its drafts."""
        return self.max_num_seqs * (1 + self.num_speculative_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBudget:
    """How a rank's memory is used, in bytes, and what comes of the rest.

    Attributes:
        weights: held weights.
        transfer_buffer: memory that peers write.
        workspace: results of dispatch and products of one layer, and logits.
        graphs: instantiated CUDA graphs.
        moving: outbox and inbox of experts that move.
        context: of CUDA and libraries, and what the allocator cannot use.
        kv: of `num_blocks` blocks.
        num_blocks: of the KV pool, the dummy block included.
        num_local_experts: slots of a rank.
        device: all of it.
    """

    weights: int
    transfer_buffer: int
    workspace: int
    graphs: int
    moving: int
    context: int
    kv: int
    num_blocks: int
    num_local_experts: int
    device: int

    @property
    def taken(self) -> int:
        """By all but KV."""
        held = self.weights + self.transfer_buffer + self.workspace
        return held + self.graphs + self.moving + self.context


def weights_per_rank(
    config: DeepseekV3Config, *, num_local_experts: int, with_mtp: bool = False
) -> WeightBytes:
    """Return what a decode rank holds: all but the routed experts whole (tp = 1).

    Args:
        config: of the model, with weights in blocks of 128 x 128.
        num_local_experts: slots of the rank.
        with_mtp: count the multi-token-prediction layers.
    """
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    mtp_layers = config.num_nextn_predict_layers if with_mtp else 0
    layers, moe_layers = config.num_hidden_layers + mtp_layers, config.num_moe_layers + mtp_layers
    dense_layers = config.num_hidden_layers - config.num_moe_layers
    up_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
    queries = heads * config.qk_head_dim
    attention = 2 * (2 * hidden + rank) + _fp8(hidden, heads * config.v_head_dim)
    if config.q_lora_rank is None:
        attention += _fp8(queries, hidden) + _fp8(config.latent_dim, hidden)
    else:
        attention += _fp8(config.q_lora_rank + config.latent_dim, hidden)
        attention += _fp8(queries, config.q_lora_rank) + 2 * config.q_lora_rank
    expert = _gated(hidden, config.moe_intermediate_size)
    shared = _gated(hidden, config.moe_intermediate_size * config.n_shared_experts)
    tables = 1 if config.tie_word_embeddings else 2
    return WeightBytes(
        attention=layers * attention,
        up_projection=layers * 2 * up_rows * rank,
        up_projection_source=layers * _fp8(up_rows, rank),
        dense=dense_layers * _gated(hidden, config.intermediate_size),
        shared_experts=moe_layers * shared,
        gates=moe_layers * config.n_routed_experts * (2 * hidden + 4),
        routed_experts=moe_layers * num_local_experts * expert,
        embedding=2 * tables * config.vocab_size * hidden + 2 * hidden,
        mtp=mtp_layers * (2 * 2 * hidden * hidden + 3 * 2 * hidden),
    )


def divide_memory(config: DeepseekV3Config, plan: DecodePlan) -> DecodeBudget:
    """Divide a decode rank's memory; whether the longest request fits is the caller's to see.

    Raises:
        ConfigError: experts that cannot be dealt to the ranks, more tokens than the buffers take,
            or weights that do not fit.
    """
    parts = _parts(config, plan)
    room = plan.device_bytes - parts.taken
    if room <= 0:
        raise _too_large(config, plan, parts.weights)
    layers = config.num_kv_layers(with_mtp=plan.with_mtp)
    block_bytes = layers * plan.block_size * plan.latent_bytes
    num_blocks = room // block_bytes
    return replace(parts, kv=num_blocks * block_bytes, num_blocks=num_blocks)


def _parts(config: DeepseekV3Config, plan: DecodePlan) -> DecodeBudget:
    """All but KV."""
    shape = check_placement(config, plan)
    weights = weights_per_rank(
        config, num_local_experts=shape.num_local_experts, with_mtp=plan.with_mtp
    )
    layers = config.num_kv_layers(with_mtp=plan.with_mtp)
    return DecodeBudget(
        weights=weights.total,
        transfer_buffer=shape.buffer_bytes,
        workspace=_workspace(config, plan, shape),
        graphs=plan.num_graphs * layers * GRAPH_NODES_PER_LAYER * GRAPH_NODE_BYTES,
        moving=2 * _expert_box(config) if plan.moves_experts else 0,
        context=CONTEXT_BYTES + int(ALLOCATOR_SLACK * plan.device_bytes),
        kv=0,
        num_blocks=0,
        num_local_experts=shape.num_local_experts,
        device=plan.device_bytes,
    )


def _too_large(config: DeepseekV3Config, plan: DecodePlan, weights: int) -> ConfigError:
    """Say which number of redundant experts fits, or else from how many ranks on it fits."""
    num_slots = config.n_routed_experts + plan.num_redundant_experts
    problem = (
        f"weights of {weights / 1e9:.1f} GB per rank leave no room for KV in "
        f"{plan.device_bytes / 1e9:.1f} GB"
    )
    # Any number less by whole ranks can be dealt evenly, too.
    for fewer in range(plan.num_redundant_experts - plan.num_ranks, -1, -plan.num_ranks):
        if _fits(config, replace(plan, num_redundant_experts=fewer)):
            number = plan.num_redundant_experts
            return ConfigError("num_redundant_experts", number, problem, f"{fewer} or less")
    fix = "more ranks, so that each holds fewer experts"
    for ranks in range(plan.num_ranks + 1, num_slots + 1):
        if _fits(config, replace(plan, num_ranks=ranks)):
            fix = f"{ranks} or more ranks, so that each holds fewer experts"
            break
    return ConfigError("dp", plan.num_ranks, problem, fix)


def _fits(config: DeepseekV3Config, plan: DecodePlan) -> bool:
    """Whether something is left for KV; without looking for what would fit instead."""
    num_slots = config.n_routed_experts + plan.num_redundant_experts
    if num_slots % plan.num_ranks:
        return False
    try:
        return _parts(config, plan).taken < plan.device_bytes
    except ConfigError:  # The exchange does not serve so many ranks.
        return False


def check_placement(config: DeepseekV3Config, plan: DecodePlan) -> LowLatencyShape | NvlinkShape:
    """Return the sizes of dispatch, or refuse what cannot be dealt or sent.

    Raises:
        ConfigError: the field, its value, and the fix.
    """
    if plan.num_redundant_experts < 0:
        raise ConfigError(
            "num_redundant_experts", plan.num_redundant_experts, "is negative", "0 or more"
        )
    num_slots = config.n_routed_experts + plan.num_redundant_experts
    if num_slots % plan.num_ranks:
        missing = -num_slots % plan.num_ranks
        raise ConfigError(
            "num_redundant_experts",
            plan.num_redundant_experts,
            f"{config.n_routed_experts} + {plan.num_redundant_experts} experts cannot be dealt "
            f"evenly to {plan.num_ranks} ranks",
            f"{plan.num_redundant_experts + missing}",
        )
    if plan.tokens_per_step > plan.max_tokens_per_rank:
        each = 1 + plan.num_speculative_tokens
        raise ConfigError(
            "max_num_seqs",
            plan.max_num_seqs,
            f"{plan.tokens_per_step} tokens a step, and max_tokens_per_rank is "
            f"{plan.max_tokens_per_rank}",
            f"{plan.max_tokens_per_rank // each}, or a larger max_tokens_per_rank",
        )
    if plan.by_nvlink:
        return NvlinkShape(
            num_ranks=plan.num_ranks,
            num_experts=num_slots,
            max_tokens_per_rank=plan.max_tokens_per_rank,
            hidden_size=config.hidden_size,
            top_k=config.num_experts_per_tok,
        )
    shape = LowLatencyShape(
        num_ranks=plan.num_ranks,
        num_experts=num_slots,
        max_tokens_per_rank=plan.max_tokens_per_rank,
        hidden_size=config.hidden_size,
    )
    shape.check_library(config.num_experts_per_tok)
    return shape


def _workspace(
    config: DeepseekV3Config, plan: DecodePlan, shape: LowLatencyShape | NvlinkShape
) -> int:
    """Return the most that one MoE layer or the head needs at once; layers share it."""
    rows = shape.num_local_experts * shape.rows_per_expert
    width, hidden = config.moe_intermediate_size, config.hidden_size
    experts = rows * (2 * 2 * width + width + 4 * width // 128 + 2 * hidden)
    tokens = plan.tokens_per_step
    # Scores in float32, and as many again for what sampling makes of them.
    head = tokens * config.vocab_size * 4 * 3
    attention = tokens * config.num_attention_heads * (2 * config.latent_dim + 6 * 512)
    return shape.received_bytes + max(experts, head) + attention


def _fp8(rows: int, columns: int) -> int:
    return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)


def _expert_box(config: DeepseekV3Config) -> int:
    """What one expert travels in (`engine.experts.staging`): a canary, weights and scales."""
    expert = _gated(config.hidden_size, config.moe_intermediate_size)
    return 256 + -(-expert // 256) * 256


def _gated(hidden: int, width: int) -> int:
    return 2 * _fp8(width, hidden) + _fp8(hidden, width) if width else 0
