"""Multi-head latent attention: project, remember the latent, attend in one of two forms.

Written after section 2.1.1 of the DeepSeek-V3 report. A token leaves C + R numbers in the cache:
kv_c, from which every head's key and value can be expanded, and k_pe, the rotated key part that all
heads share. Heads are split over the tp ranks; the latents are whole on each. Where the ranks keep
shares of the hidden states, each makes the latents of its own rows, and those are gathered: they
are less than a third as wide.

Legend: T tokens, t rows of this rank, D hidden size, H heads of this rank, N qk_nope_head_dim,
R qk_rope_head_dim, A = N + R, V v_head_dim, C kv_lora_rank, P context positions.
"""

import torch
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.kernels.absorb_reference import carry
from engine.kernels.fp8_rows import Activation, Fp8Rows
from engine.kernels.paged_queries import PagedQueries
from engine.kernels.rotation import Rotation
from engine.layers.attention_plan import AttentionStep, ContextPart, DecompressedSegment
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.norm import FeedFormat, RMSNorm
from engine.layers.rotary import softmax_scale
from engine.operations import Operations
from engine.parallel.pending import Ready


class MLA(nn.Module):
    """Attention of layer `layer_index`, which is also its place in the KV pool.

    Attributes:
        feed_format: of the rows that `forward` takes.
    """

    def __init__(self, config: ModelConfig, ctx: LayerContext, layer_index: int) -> None:
        super().__init__()
        self._kernels = ctx.kernels
        self._sharding = ctx.sharding
        self.layer_index = layer_index
        self.num_heads = config.num_attention_heads // ctx.groups.tp_group.size
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value_dim = config.v_head_dim
        self.q_lora_rank, self.kv_lora_rank = config.q_lora_rank or 0, config.kv_lora_rank
        self.interleave = config.rope_interleave
        self.scale = softmax_scale(config)

        all_heads = config.num_attention_heads
        latents = {"kv_a_proj_with_mqa": config.latent_dim}
        if config.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(
                ctx, config.hidden_size, {"q_proj": all_heads * config.qk_head_dim}
            )
        else:
            # One product for both latents: they share their input.
            latents = {"q_a_proj": config.q_lora_rank, **latents}
            self.q_a_layernorm = RMSNorm(ctx, config.q_lora_rank)
            self.q_b_proj = ColumnParallelLinear(
                ctx, config.q_lora_rank, {"q_b_proj": all_heads * config.qk_head_dim}
            )
        self.qkv_a_proj = ColumnParallelLinear(ctx.unsplit, config.hidden_size, latents)
        self.kv_a_layernorm = RMSNorm(ctx, config.kv_lora_rank)
        self.kv_b_proj = ColumnParallelLinear(
            ctx, config.kv_lora_rank, {"kv_b_proj": all_heads * (self.nope_dim + self.value_dim)}
        )
        self.o_proj = RowParallelLinear(
            ctx.within("o_proj"), all_heads * self.value_dim, config.hidden_size
        )
        is_fp8 = self.qkv_a_proj.is_fp8 and (self.q_lora_rank > 0 or self.q_proj.is_fp8)
        self.feed_format = FeedFormat.of(is_fp8=is_fp8)
        # Of kv_b_proj, made at the first absorbed step: the weight itself unless that is FP8.
        self._up_weight: Tensor | None = None

    def forward(self, hidden: Activation, step: AttentionStep) -> Operations[Tensor]:
        """Attend; writes this step's latents into the pool first.

        Args:
            hidden: [t, D], normalised.
            step: of the running batch.

        Returns:
            [t, D], complete.
        """
        sharding, num_tokens = self._sharding, step.slot_mapping.shape[0]

        # 1. project own rows down, gather the latents of all tokens
        gathering = sharding.start_gather(self.qkv_a_proj(hidden), num_tokens)
        # Without a query latent, queries come from the hidden states themselves.
        has_latent = self.q_lora_rank > 0
        all_hidden = Ready(hidden) if has_latent else sharding.start_gather_padded(hidden)
        yield
        latents_T = gathering.wait()

        # 2. remember the latents, project queries up
        if has_latent:
            q_THA = self._project(latents_T, step)
        else:
            self._remember(latents_T, step)
            q_THA = self._project_hidden(all_hidden.wait(), num_tokens)

        # 3. attend over all that is remembered, 4. back to the hidden size
        reducing = sharding.start_reduce(self.o_proj(self._attend(q_THA, step)))
        yield
        return reducing.wait()

    def prepare_absorption(self) -> None:
        """Make the weights of the absorbed form now, rather than in its first step.

        After loading; a step that is captured in a graph must find them.
        """
        self._up_projections()

    def _attend(self, q_THA: Tensor, step: AttentionStep) -> Activation:
        """Attend in the forms of the plan: [T, H * V], padded for the next product."""
        if step.plan.paged is not None:
            return self._attend_paged(q_THA, step, step.plan.paged)
        self._kernels.rotate_queries(q_THA, self._rotation(step))
        return self._sharding.pad(self._attend_in_parts(q_THA, step).flatten(1))

    def _attend_in_parts(self, q_THA: Tensor, step: AttentionStep) -> Tensor:
        """Attend in whichever form the plan says for each sequence: [T, H, V]."""
        plan = step.plan
        if len(plan.segments) == 1 and not plan.groups and not plan.paged_groups:
            return self._attend_decompressed(q_THA, step, plan.segments[0])
        out_THV = q_THA.new_empty((*q_THA.shape[:2], self.value_dim))
        for segment in plan.segments:
            out_THV[segment.rows] = self._attend_decompressed(q_THA[segment.rows], step, segment)
        for group in plan.paged_groups:
            out_THV[group.rows] = self._attend_group(q_THA[group.rows], step, group.queries)
        if plan.groups:
            rows = plan.absorbed_rows
            out_THV[rows] = self._attend_absorbed(q_THA[rows], step)
        return out_THV

    def _project(self, latents_TX: Tensor, step: AttentionStep) -> Tensor:
        """Write latents into the pool, and map query latents up: of [T, Q + C + R], [T, H, A]."""
        norm = self.q_a_layernorm
        if not self.q_b_proj.is_fp8:
            q_TQ, latents_TL = latents_TX.tensor_split([self.q_lora_rank], dim=1)
            self._remember(latents_TL, step)
            return self._per_head(self.q_b_proj(norm(q_TQ)))
        assert norm.eps == self.kv_a_layernorm.eps
        rows = self._kernels.split_latents(
            latents_TX,
            norm.weight,
            self.kv_a_layernorm.weight,
            norm.eps,
            self._rotation(step),
            cache=step.kv_pool.layer(self.layer_index),
            slots_T=step.slot_mapping,
        )
        return self._per_head(self.q_b_proj(rows))

    def _project_hidden(self, hidden: Activation, num_tokens: int) -> Tensor:
        """Map hidden states [>= T, D] to queries [T, H, A]."""
        rows = hidden.column_major() if isinstance(hidden, Fp8Rows) else hidden
        return self._per_head(self.q_proj(rows)[:num_tokens])

    def _remember(self, latents_TL: Tensor, step: AttentionStep) -> None:
        """Write latents [T, C + R] into the pool."""
        norm = self.kv_a_layernorm
        self._kernels.store_latents(
            latents_TL,
            norm.weight,
            norm.eps,
            self._rotation(step),
            cache=step.kv_pool.layer(self.layer_index),
            slots_T=step.slot_mapping,
        )

    def _rotation(self, step: AttentionStep) -> Rotation:
        return Rotation(cos=step.cos, sin=step.sin, interleave=self.interleave)

    def _attend_decompressed(
        self, q_THA: Tensor, step: AttentionStep, segment: DecompressedSegment
    ) -> Tensor:
        """Attend with keys and values expanded, one part of a long context at a time: [T, H, V]."""
        kernels = self._kernels
        *prefix, own = segment.parts
        k_PHA, v_PHV = self._expand(step, own, q_THA.dtype)
        if not prefix:
            return kernels.varlen_attention(q_THA, k_PHA, v_PHV, own.seqs, self.scale)
        out_THV, lse_HT = kernels.varlen_attention_part(
            q_THA, k_PHA, v_PHV, own.seqs, self.scale, is_causal=True
        )
        for part in prefix:
            del k_PHA, v_PHV  # at most one part's keys and values at a time
            k_PHA, v_PHV = self._expand(step, part, q_THA.dtype)
            other = kernels.varlen_attention_part(
                q_THA, k_PHA, v_PHV, part.seqs, self.scale, is_causal=False
            )
            out_THV, lse_HT = kernels.merge_attention(out_THV, lse_HT, *other)
        return out_THV

    def _expand(
        self, step: AttentionStep, part: ContextPart, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Expand latents to every head's keys [P, H, A] and values [P, H, V]."""
        latents_PL = step.gather(self.layer_index, part.block_ids, dtype)[part.kept]
        kv_c_PC, k_pe_PR = latents_PL.split_with_sizes((self.kv_lora_rank, self.rope_dim), dim=-1)
        k_nope_PHN, v_PHV = self._per_head(self.kv_b_proj(kv_c_PC)).split_with_sizes(
            (self.nope_dim, self.value_dim), dim=-1
        )
        return self._kernels.join_keys(k_nope_PHN, k_pe_PR), v_PHV

    def _attend_group(self, q_THA: Tensor, step: AttentionStep, queries: PagedQueries) -> Tensor:
        """Attend in the latent space with rotated queries, by block tables: [T, H, V]."""
        w_uk_HNC, w_uv_HVC = self._up_projections()
        cache = step.kv_pool.layer(self.layer_index)
        out_THC = self._kernels.paged_attention(
            carry(q_THA, w_uk_HNC), cache, queries, self.kv_lora_rank, self.scale
        )
        return torch.bmm(out_THC.transpose(0, 1), w_uv_HVC.transpose(1, 2)).transpose(0, 1)

    def _attend_absorbed(self, q_THA: Tensor, step: AttentionStep) -> Tensor:
        """Attend in the latent space, all groups' rows at once where they allow: [T, H, V]."""
        w_uk_HNC, w_uv_HVC = self._up_projections()
        q_THL = carry(q_THA, w_uk_HNC)
        out_THC = q_THL.new_empty((*q_THL.shape[:2], self.kv_lora_rank))
        for group in step.plan.groups:
            num_seqs, num_queries, _ = group.hidden_SQP.shape
            q_SQHL = q_THL[group.rows].view(num_seqs, num_queries, self.num_heads, -1)
            out_SQHC = out_THC[group.rows].view(num_seqs, num_queries, self.num_heads, -1)
            latents_SPL = step.gather_group(self.layer_index, group, q_THL.dtype)
            for first in range(0, num_queries, group.num_at_once):
                some = slice(first, first + group.num_at_once)
                out_SQHC[:, some] = self._kernels.absorbed_attention(
                    q_SQHL[:, some],
                    latents_SPL,
                    group.hidden_SQP[:, some],
                    self.kv_lora_rank,
                    self.scale,
                )
        return torch.bmm(out_THC.transpose(0, 1), w_uv_HVC.transpose(1, 2)).transpose(0, 1)

    def _attend_paged(
        self, q_THA: Tensor, step: AttentionStep, queries: PagedQueries
    ) -> Activation:
        """Attend in the latent space, one query a sequence, in the pages themselves: [T, H * V]."""
        kernels, cache = self._kernels, step.kv_pool.layer(self.layer_index)
        w_uk_HNC, w_uv_HVC = self._up_projections()
        q_THL = kernels.absorb_queries(q_THA, w_uk_HNC, self._rotation(step), cache)
        out_THC = kernels.paged_attention(q_THL, cache, queries, self.kv_lora_rank, self.scale)
        is_padded = self._sharding.sends_rows
        fp8 = self.o_proj.is_fp8 and not is_padded
        values = kernels.expand_values(out_THC, w_uv_HVC, fp8=fp8)
        return self._sharding.pad(values) if isinstance(values, Tensor) else values

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """Return kv_b_proj per head in the compute dtype: W_UK [H, N, C] and W_UV [H, V, C]."""
        if self._up_weight is None:
            self._up_weight = self.kv_b_proj.matrix.dequantized()
        per_head = self._up_weight.view(self.num_heads, -1, self.kv_lora_rank)
        w_uk_HNC, w_uv_HVC = per_head.split_with_sizes((self.nope_dim, self.value_dim), dim=1)
        return w_uk_HNC, w_uv_HVC

    def _per_head(self, x: Tensor) -> Tensor:
        """View [T, H * n] as [T, H, n]."""
        return x.view(x.shape[0], self.num_heads, x.shape[1] // self.num_heads)
