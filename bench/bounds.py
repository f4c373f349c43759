"""What the hardware allows: arithmetic from a model's shape, with no measurement in it.

Counts operations and bytes of one token or one step, and divides them by a GPU's rates. The key
idea: a bound is a ratio of two things that anybody can check by hand, so a measurement is given as
a share of it, and a share above 1 means that the measurement is wrong. Left out on purpose: norms,
activations, quantisation, routing, launches, and the output head of a prefill (one row a prompt).

Sources: shapes of arXiv:2412.19437; rates of NVIDIA's H200 data sheet (dense, SXM), and the shares
of them that published kernels reach.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from engine.config import DeepseekV3Config
from experts.data_sheets import H200, Hardware

FP8_GROUP: Final = 128
"""Numbers that share a float32 scale in a row that travels in FP8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFlops:
    """Operations per token of the products with weights, all layers, a multiply-add as two.

    Attributes:
        attention: projections.
        latents: of those, the projections down to the latents (q_a and kv_a).
        dense: feed-forward of the dense layers.
        routed: chosen experts.
        shared: shared experts.
        router: scores of all experts.
        head: output head; not in `total`.
    """

    attention: float
    latents: float
    dense: float
    routed: float
    shared: float
    router: float
    head: float

    @property
    def moe(self) -> float:
        """Router, chosen and shared experts."""
        return self.routed + self.shared + self.router

    @property
    def total(self) -> float:
        """All layers."""
        return self.attention + self.dense + self.moe


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Weights of one attention layer, in numbers.

    Attributes:
        latents: q_a (if there is one) and kv_a.
        q: q_b, or the only query projection.
        kv_b: expands latents to keys and values; absorbed attention multiplies with it too.
        out: o_proj.
    """

    latents: int
    q: int
    kv_b: int
    out: int

    @classmethod
    def of(cls, config: DeepseekV3Config) -> "AttentionWeights":
        """Return those of a model."""
        hidden, heads = config.hidden_size, config.num_attention_heads
        rank = config.q_lora_rank
        return cls(
            latents=hidden * ((rank or 0) + config.latent_dim),
            q=(rank or hidden) * heads * config.qk_head_dim,
            kv_b=config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim),
            out=heads * config.v_head_dim * hidden,
        )

    @property
    def total(self) -> int:
        """All four."""
        return self.latents + self.q + self.kv_b + self.out


def linear_flops(config: DeepseekV3Config) -> LinearFlops:
    """Count the products of one token."""
    weights, layers = AttentionWeights.of(config), config.num_hidden_layers
    dense, moe = layers - config.num_moe_layers, config.num_moe_layers
    expert = expert_numbers(config)
    return LinearFlops(
        attention=2.0 * layers * weights.total,
        latents=2.0 * layers * weights.latents,
        dense=2.0 * dense * 3 * config.hidden_size * config.intermediate_size,
        routed=2.0 * moe * config.num_experts_per_tok * expert,
        shared=2.0 * moe * config.n_shared_experts * expert,
        router=2.0 * moe * config.hidden_size * config.n_routed_experts,
        head=2.0 * config.hidden_size * config.vocab_size,
    )


def expert_numbers(config: DeepseekV3Config) -> int:
    """Count the weights of one expert: gate, up and down."""
    return 3 * config.hidden_size * config.moe_intermediate_size


def pair_flops(config: DeepseekV3Config, *, absorbed: bool) -> int:
    """Count the operations of one (query, key) pair in one layer, all heads, in either form."""
    if absorbed:
        width = config.latent_dim + config.kv_lora_rank
    else:
        width = config.qk_head_dim + config.v_head_dim
    return 2 * config.num_attention_heads * width


def attention_flops(config: DeepseekV3Config, prompt_len: int, *, absorbed: bool = False) -> float:
    """Count the operations of causal attention, per token of a prompt in the mean, all layers."""
    pairs = (prompt_len + 1) / 2
    return pairs * pair_flops(config, absorbed=absorbed) * config.num_hidden_layers


class PrefillTraffic(StrEnum):
    """How the ranks of a prefill instance share hidden states.

    ALL_REDUCE: two all-reduces a layer, every rank holds all rows, and repeats the projections
    to the latents. LATENTS: rows are scattered; a layer gathers latents, reduce-scatters the
    attention's output, gathers rows for the experts and reduce-scatters theirs. LATENTS_FP8: the
    same, with the gather before the experts in FP8. ALL_TO_ALL: each rank has its own tokens, sent
    in FP8 once to each rank that holds one of their experts.
    """

    ALL_REDUCE = "all-reduce"
    LATENTS = "latents"
    LATENTS_FP8 = "latents-fp8"
    ALL_TO_ALL = "all-to-all"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBound:
    """Least seconds of the whole instance per token, and what they allow.

    Attributes:
        compute_s: products and attention.
        traffic_s: bytes that one GPU sends, over its link.
        traffic_bytes: those bytes per token of the instance.
    """

    compute_s: float
    traffic_s: float
    traffic_bytes: float

    @property
    def overlapped(self) -> float:
        """Tokens per second if traffic hides behind computing as far as it can."""
        return 1 / max(self.compute_s, self.traffic_s)

    @property
    def serial(self) -> float:
        """Tokens per second if it does not hide."""
        return 1 / (self.compute_s + self.traffic_s)


def prefill_bound(
    config: DeepseekV3Config,
    prompt_len: int,
    *,
    num_gpus: int = 8,
    traffic: PrefillTraffic = PrefillTraffic.LATENTS,
    hardware: Hardware = H200,
    ranks_per_token: float | None = None,
) -> PrefillBound:
    """Bound the prefill of whole prompts of one length: products in FP8, attention in bfloat16.

    Args:
        config: of the model.
        prompt_len: tokens of each prompt.
        num_gpus: that share the work.
        traffic: how hidden states travel; nothing travels on one GPU.
        hardware: rates of a GPU.
        ranks_per_token: for ALL_TO_ALL, ranks that hold an expert of a token in the mean, its own
            counted; None for one in each chosen group of experts.
    """
    flops = linear_flops(config)
    compute = flops.total / hardware.fp8 + attention_flops(config, prompt_len) / hardware.attention
    if traffic is PrefillTraffic.ALL_REDUCE:
        compute += (num_gpus - 1) * flops.latents / hardware.fp8
    sent = prefill_bytes(config, num_gpus, traffic, ranks_per_token)
    return PrefillBound(
        compute_s=compute / num_gpus, traffic_s=sent / hardware.link, traffic_bytes=sent
    )


def prefill_bytes(
    config: DeepseekV3Config,
    num_gpus: int,
    traffic: PrefillTraffic,
    ranks_per_token: float | None = None,
) -> float:
    """Return the bytes that each GPU sends per token of the instance; see `prefill_bound`."""
    remote = (num_gpus - 1) / num_gpus
    plain = 2.0 * config.hidden_size
    if traffic is PrefillTraffic.ALL_TO_ALL:
        ranks = ranks_per_token or min(config.topk_group, num_gpus)
        per_gpu_token = ranks * remote * (fp8_row_bytes(config) + plain) * config.num_moe_layers
        return per_gpu_token / num_gpus
    if traffic is PrefillTraffic.ALL_REDUCE:
        layer = 2 * 2 * plain
    else:
        latents = 2.0 * ((config.q_lora_rank or 0) + config.latent_dim)
        is_fp8 = traffic is PrefillTraffic.LATENTS_FP8
        layer = latents + 2 * plain + (fp8_row_bytes(config) if is_fp8 else plain)
    return layer * remote * config.num_hidden_layers


def fp8_row_bytes(config: DeepseekV3Config) -> int:
    """Return the bytes of a hidden state that travels in FP8 with its scales."""
    return config.hidden_size + 4 * (config.hidden_size // FP8_GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes of weights on one rank with its own tokens (dp): attention and shared parts whole.

    FP8 with a float32 scale a 128 x 128 block, but router, head, embedding and kv_b (which
    absorbed attention uses by heads) in bfloat16.

    Attributes:
        experts: routed experts of the rank.
        linear: everything else that a decode step reads.
        embedding: of which a step reads a row a token.
    """

    experts: float
    linear: float
    embedding: float

    @property
    def read(self) -> float:
        """By a step in which every expert gets a row."""
        return self.experts + self.linear

    @classmethod
    def of(cls, config: DeepseekV3Config, ep: int) -> "WeightBytes":
        """Return those of one of `ep` ranks."""
        block = 1 + 4 / FP8_GROUP**2
        weights, moe = AttentionWeights.of(config), config.num_moe_layers
        expert, layers = expert_numbers(config), config.num_hidden_layers
        dense = (layers - moe) * 3 * config.hidden_size * config.intermediate_size
        attention = layers * ((weights.total - weights.kv_b) * block + 2 * weights.kv_b)
        router = 2 * moe * config.hidden_size * config.n_routed_experts
        vocabulary = 2.0 * config.hidden_size * config.vocab_size
        return cls(
            experts=moe * config.n_routed_experts / ep * expert * block,
            linear=attention
            + (dense + moe * config.n_shared_experts * expert) * block
            + router
            + vocabulary,
            embedding=vocabulary,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBound:
    """Least seconds of a decode step on one GPU, by part; each the larger of operations and bytes.

    Attributes:
        batch: requests of this GPU.
        experts_s: routed experts.
        linear_s: everything else that multiplies with weights, the head included.
        head_s: of that, the head, in proportion to its bytes or operations.
        attention_s: absorbed attention over the contexts.
        all_to_all_s: one copy per remote expert, FP8 there and bfloat16 back.
        bytes: that the step reads: weights and contexts.
    """

    batch: int
    experts_s: float
    linear_s: float
    head_s: float
    attention_s: float
    all_to_all_s: float
    bytes: float

    @property
    def overlapped_s(self) -> float:
        """Seconds of a step if the traffic hides behind the rest as far as it can."""
        return max(self.compute_s, self.all_to_all_s)

    @property
    def serial_s(self) -> float:
        """Seconds of a step if it does not hide."""
        return self.compute_s + self.all_to_all_s

    @property
    def compute_s(self) -> float:
        """Seconds without traffic."""
        return self.experts_s + self.linear_s + self.attention_s

    @property
    def layers_s(self) -> float:
        """Seconds of the layers alone, without traffic."""
        return self.compute_s - self.head_s

    def tokens_per_s(self, num_gpus: int, *, serial: bool = False) -> float:
        """Return the output tokens per second of `num_gpus` such ranks."""
        return num_gpus * self.batch / (self.serial_s if serial else self.overlapped_s)


def decode_bound(
    config: DeepseekV3Config,
    batch: int,
    context: float,
    *,
    ep: int = 8,
    kv_bytes: float | None = None,
    hardware: Hardware = H200,
) -> DecodeBound:
    """Bound one step of a rank with its own requests, every expert hit, attention in bfloat16.

    Args:
        config: of the model.
        batch: requests of this rank, one token each.
        context: tokens that each attends to, in the mean.
        ep: ranks that share the experts.
        kv_bytes: per token of context and layer; None for latents in bfloat16.
        hardware: rates of the GPU.
    """
    flops, weights = linear_flops(config), WeightBytes.of(config, ep)
    latents = batch * context * config.num_hidden_layers
    kv = latents * (2.0 * config.latent_dim if kv_bytes is None else kv_bytes)
    linear = flops.total - flops.routed + flops.head
    is_read = weights.linear / hardware.memory > batch * linear / hardware.fp8
    head_share = weights.embedding / weights.linear if is_read else flops.head / linear
    linear_s = max(weights.linear / hardware.memory, batch * linear / hardware.fp8)
    sent = batch * config.num_experts_per_tok * (ep - 1) / ep * config.num_moe_layers
    return DecodeBound(
        batch=batch,
        experts_s=max(weights.experts / hardware.memory, batch * flops.routed / hardware.fp8),
        linear_s=linear_s,
        head_s=linear_s * head_share,
        attention_s=max(
            kv / hardware.memory,
            latents * pair_flops(config, absorbed=True) / hardware.attention,
        ),
        all_to_all_s=sent * (fp8_row_bytes(config) + 2 * config.hidden_size) / hardware.link,
        bytes=weights.read + kv,
    )
