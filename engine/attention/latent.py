"""Attention to latents, as DeepSeek-V3 has it: what is kept, planned, stored, and attended to.

An `AttentionBackend`. The layer's own `kv_b_proj` comes with its queries: the decompressed form
expands the context by it, and the absorbed form multiplies queries and results by it.

Legend: T tokens, H heads of this rank, N qk_nope_head_dim, R qk_rope_head_dim, A = N + R,
V v_head_dim, Q q_lora_rank, C kv_lora_rank, P context positions, R rows as attention wants them.
"""

import logging
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.attention.absorb_reference import carry, expand_heads
from engine.attention.attention_plan import (
    AttentionPlan,
    AttentionStep,
    ContextPart,
    DecompressedSegment,
    join_rows,
    plan_attention,
    plan_decode,
    plan_prompts,
    plan_suffixes,
    read_lengths,
)
from engine.attention.attention_rule import AttentionRule
from engine.attention.kv_spec import KVSpec
from engine.attention.paged_queries import PagedQueries
from engine.attention.scratch import Scratch
from engine.batch import ForwardBatch
from engine.config import DeepseekV3Config
from engine.formats.fp8_rows import Activation, Fp8Rows
from engine.kernels.base import Kernels
from engine.kernels.rotation import Rotation
from engine.layers.linear import ColumnParallelLinear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding, softmax_scale
from engine.memory.kv_pool import KVPool
from engine.ops.latents import JOIN_KEYS, ROTATE_QUERIES, SPLIT_LATENTS, STORE_LATENTS

logger = logging.getLogger(__name__)


class LatentLayer(Protocol):
    """What attention needs of a layer: `kv_b_proj`, as a product and as its two halves."""

    @property
    def kv_b_proj(self) -> ColumnParallelLinear:
        """From C to every head's N + V."""
        ...

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """Return it per head in the compute dtype: W_UK [H, N, C] and W_UV [H, V, C]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Latents:
    """What a layer leaves for T tokens: latents [T, C + R] as projected, and the norm of kv_c."""

    latents_TL: Tensor
    norm: RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentQueries:
    """What a layer asks with.

    Attributes:
        q_THA: [T, H, A], not rotated; may be overwritten.
        layer: that asks.
        wants_fp8: whether the result is best given as `Fp8Rows`.
    """

    q_THA: Tensor
    layer: LatentLayer
    wants_fp8: bool = False


class _Place(NamedTuple):
    """Which layer attends in which step."""

    layer_index: int
    layer: LatentLayer
    step: AttentionStep


class LatentAttention:
    """See the module; an `AttentionBackend[AttentionStep, Latents, LatentQueries]`.

    Attributes:
        rule: when attention is absorbed, and how much of it at a time.
        device: of the model.
    """

    def __init__(
        self, config: DeepseekV3Config, kernels: Kernels, device: torch.device, rule: AttentionRule
    ) -> None:
        self.rule, self.device = rule, device
        self._config, self._kernels, self._scratch = config, kernels, Scratch()
        ops = kernels.ops
        self._store_latents, self._split_latents = ops[STORE_LATENTS], ops[SPLIT_LATENTS]
        self._rotate_queries, self._join_keys = ops[ROTATE_QUERIES], ops[JOIN_KEYS]
        self._attention = kernels.attention
        self._scale = softmax_scale(config)
        self._rotary, self._is_refusal_told = RotaryEmbedding.of(config, device), False
        self._planned: tuple[ForwardBatch, AttentionStep] | None = None

    @property
    def kv_spec(self) -> KVSpec:
        """See `AttentionBackend`; every rank keeps the latents whole."""
        return self._config.kv_spec

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> AttentionStep:
        """Return what all layers of a step share: plan, angles, slots, pool."""
        if self.device.type == "cpu" and self._planned is not None:
            planned, step = self._planned
            if planned is batch and step.kv_pool is kv_pool:
                return step
        cos, sin = self._rotary(batch.positions)
        step = AttentionStep(
            plan=self._plan(batch, kv_pool),
            slot_mapping=batch.slot_mapping,
            cos=cos,
            sin=sin,
            kv_pool=kv_pool,
            # What is captured keeps its memory, which a longer step would replace otherwise.
            scratch=self._scratch if batch.prompts is None else Scratch(),
        )
        if self.device.type == "cpu":
            # The layer for drafts runs the same rows next. A GPU's memory is not to be held so.
            self._planned = batch, step
        return step

    def _plan(self, batch: ForwardBatch, kv_pool: KVPool) -> AttentionPlan:
        cache, kernels = kv_pool.layer(0), self._attention
        if batch.prompts is not None:
            return plan_prompts(batch, reads_lengths=not kernels.max_positions)
        num_heads = self.rule.heads
        refusal = kernels.why_no_pages(cache, self._config.kv_lora_rank)
        if batch.max_seqlen_q == 1 and not refusal:
            return plan_decode(batch, kernels, cache, num_heads)
        plan_pages = partial(kernels.plan_paged, cache=cache, num_heads=num_heads)
        is_fixed = not batch.lengths and batch.num_seqs > 0
        if is_fixed and not refusal:
            return plan_suffixes(batch, kernels, cache, num_heads)
        if refusal:
            self._tell(refusal)
        if is_fixed:
            # On a GPU this waits for the device, which no graph can hold: attending over whole
            # tables instead would cost as much as the longest context that may come.
            batch = read_lengths(batch)
            batch = join_rows(batch) if batch.max_seqlen_q == 1 else batch
        return plan_attention(
            batch,
            kv_pool.block_size,
            self.rule,
            max_positions=kernels.max_positions,
            plan_pages=None if refusal else plan_pages,
        )

    def _tell(self, refusal: str) -> None:
        """Say once that a GPU attends by the reference."""
        if self.device.type == "cuda" and not self._is_refusal_told:
            self._is_refusal_told = True
            logger.warning("attention to the KV pool runs by the reference, slowly: %s", refusal)

    def store(self, stored: Latents, layer_index: int, step: AttentionStep) -> None:
        """See `AttentionBackend`."""
        self._store_latents(
            stored.latents_TL,
            stored.norm.weight,
            stored.norm.eps,
            self._rotation(step),
            cache=step.kv_pool.layer(layer_index),
            slots_T=step.slot_mapping,
        )

    def store_beside_queries(
        self,
        latents_TX: Tensor,
        q_norm: RMSNorm,
        kv_norm: RMSNorm,
        layer_index: int,
        step: AttentionStep,
    ) -> Fp8Rows:
        """Store as `store` does and norm the query latents too, in one pass over [T, Q + C + R].

        Returns:
            [T, Q] in FP8.
        """
        assert q_norm.eps == kv_norm.eps
        return self._split_latents(
            latents_TX,
            q_norm.weight,
            kv_norm.weight,
            q_norm.eps,
            self._rotation(step),
            cache=step.kv_pool.layer(layer_index),
            slots_T=step.slot_mapping,
        )

    def attend(self, queries: LatentQueries, layer_index: int, step: AttentionStep) -> Activation:
        """See `AttentionBackend`; in the forms of the plan."""
        q_THA, at = queries.q_THA, _Place(layer_index, queries.layer, step)
        paged = step.plan.paged_whole(q_THA.shape[0])
        if paged is not None:
            return self._attend_paged(q_THA, at, paged, fp8=queries.wants_fp8)
        self._rotate_queries(q_THA, self._rotation(step))
        return self._attend_in_parts(q_THA, at).flatten(1)

    def _attend_in_parts(self, q_THA: Tensor, at: _Place) -> Tensor:
        """Attend in whichever form the plan says for each sequence: [T, H, V]."""
        plan, value_dim = at.step.plan, self._config.v_head_dim
        if len(plan.segments) == 1 and not plan.groups and not plan.paged_groups:
            return self._attend_decompressed(q_THA, at, plan.segments[0])
        if plan.groups and plan.absorbed_rows == slice(0, q_THA.shape[0]):
            return self._attend_absorbed(q_THA, at)  # all rows, in their order
        out_THV = q_THA.new_empty((*q_THA.shape[:2], value_dim))
        for segment in plan.segments:
            out_THV[segment.rows] = self._attend_decompressed(q_THA[segment.rows], at, segment)
        for group in plan.paged_groups:
            out_THV[group.rows] = self._attend_group(q_THA[group.rows], at, group.queries)
        if plan.groups:
            rows = plan.absorbed_rows
            out_THV[rows] = self._attend_absorbed(q_THA[rows], at)
        return out_THV

    def _attend_decompressed(
        self, q_THA: Tensor, at: _Place, segment: DecompressedSegment
    ) -> Tensor:
        """Attend with keys and values expanded, one part of a long context at a time: [T, H, V]."""
        kernels = self._attention
        *prefix, own = segment.parts
        k_PHA, v_PHV = self._expand(at, own, q_THA.dtype)
        if not prefix:
            return kernels.varlen_attention(q_THA, k_PHA, v_PHV, own.seqs, self._scale)
        out_THV, lse_HT = kernels.varlen_attention_part(
            q_THA, k_PHA, v_PHV, own.seqs, self._scale, is_causal=True
        )
        for part in prefix:
            del k_PHA, v_PHV  # at most one part's keys and values at a time
            k_PHA, v_PHV = self._expand(at, part, q_THA.dtype)
            other = kernels.varlen_attention_part(
                q_THA, k_PHA, v_PHV, part.seqs, self._scale, is_causal=False
            )
            out_THV, lse_HT = kernels.merge_attention(out_THV, lse_HT, *other)
        return out_THV

    def _expand(self, at: _Place, part: ContextPart, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Expand latents to every head's keys [P, H, A] and values [P, H, V]."""
        config = self._config
        latents_PL = at.step.gather(at.layer_index, part.block_ids, dtype)[part.kept]
        kv_c_PC, k_pe_PR = latents_PL.split_with_sizes(
            (config.kv_lora_rank, config.qk_rope_head_dim), dim=-1
        )
        widths = (config.qk_nope_head_dim, config.v_head_dim)
        heads_PHX = at.layer.kv_b_proj(kv_c_PC).unflatten(1, (self.rule.heads, sum(widths)))
        k_nope_PHN, v_PHV = heads_PHX.split_with_sizes(widths, dim=-1)
        return self._join_keys(k_nope_PHN, k_pe_PR), v_PHV

    def _attend_group(self, q_THA: Tensor, at: _Place, queries: PagedQueries) -> Tensor:
        """Attend in the latent space with rotated queries, by block tables: [T, H, V]."""
        w_uk_HNC, w_uv_HVC = at.layer.up_projections()
        cache = at.step.kv_pool.layer(at.layer_index)
        out_THC = self._attention.paged_attention(
            carry(q_THA, w_uk_HNC), cache, queries, self._config.kv_lora_rank, self._scale
        )
        return expand_heads(out_THC, w_uv_HVC)

    def _attend_absorbed(self, q_THA: Tensor, at: _Place) -> Tensor:
        """Attend in the latent space, all groups' rows at once where they allow: [T, H, V]."""
        w_uk_HNC, w_uv_HVC = at.layer.up_projections()
        q_THL = carry(q_THA, w_uk_HNC)
        out_THC = q_THL.new_empty((*q_THL.shape[:2], self._config.kv_lora_rank))
        for group in at.step.plan.groups:
            num_seqs, num_queries, _ = group.hidden_SQP.shape
            q_SQHL = q_THL[group.rows].view(num_seqs, num_queries, self.rule.heads, -1)
            out_SQHC = out_THC[group.rows].view(num_seqs, num_queries, self.rule.heads, -1)
            latents_SPL = at.step.gather_group(at.layer_index, group, q_THL.dtype)
            for first in range(0, num_queries, group.num_at_once):
                some = slice(first, first + group.num_at_once)
                out_SQHC[:, some] = self._attention.absorbed_attention(
                    q_SQHL[:, some],
                    latents_SPL,
                    group.hidden_SQP[:, some],
                    self._config.kv_lora_rank,
                    self._scale,
                )
        return expand_heads(out_THC, w_uv_HVC)

    def _attend_paged(
        self, q_THA: Tensor, at: _Place, queries: PagedQueries, *, fp8: bool
    ) -> Activation:
        """Attend in the latent space with all rows, in the pages themselves: [T, H * V]."""
        kernels, cache = self._attention, at.step.kv_pool.layer(at.layer_index)
        w_uk_HNC, w_uv_HVC = at.layer.up_projections()
        q_RHL = kernels.absorb_queries(q_THA, w_uk_HNC, self._rotation(at.step), cache, queries)
        out_RHC = kernels.paged_attention(
            q_RHL, cache, queries, self._config.kv_lora_rank, self._scale
        )
        return kernels.expand_values(out_RHC, w_uv_HVC, queries, fp8=fp8)

    def _rotation(self, step: AttentionStep) -> Rotation:
        return Rotation(cos=step.cos, sin=step.sin, interleave=self._config.rope_interleave)
