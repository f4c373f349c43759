"""Multi-head latent attention: project, remember the latent, attend in one of two forms.

Written after section 2.1.1 of the DeepSeek-V3 report. A token leaves C + R numbers in the cache:
kv_c, from which every head's key and value can be expanded, and k_pe, the rotated key part that all
heads share. Heads are split over the tp ranks; the latents are whole on each.

Legend: T tokens, D hidden size, H heads of this rank, N qk_nope_head_dim, R qk_rope_head_dim,
A = N + R, V v_head_dim, C kv_lora_rank, P context positions.
"""

import torch
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.kernels import reference
from engine.layers.attention_plan import AttentionStep, DecompressedSegment
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import softmax_scale


class MLA(nn.Module):
    """Attention of layer `layer_index`, which is also its place in the KV pool."""

    def __init__(self, config: ModelConfig, ctx: LayerContext, layer_index: int) -> None:
        super().__init__()
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
        self.qkv_a_proj = ReplicatedLinear(ctx, config.hidden_size, latents)
        self.kv_a_layernorm = RMSNorm(ctx, config.kv_lora_rank)
        self.kv_b_proj = ColumnParallelLinear(
            ctx, config.kv_lora_rank, {"kv_b_proj": all_heads * (self.nope_dim + self.value_dim)}
        )
        self.o_proj = RowParallelLinear(ctx, all_heads * self.value_dim, config.hidden_size)

    def forward(self, hidden_TD: Tensor, step: AttentionStep) -> Tensor:
        """Attend; writes this step's latents into the pool first.

        Args:
            hidden_TD: [T, D], normalised.
            step: of the running batch.

        Returns:
            [T, D], complete on every tp rank.
        """
        # 1. project and rotate
        q_nope_THN, q_pe_THR = self._queries_and_latents(hidden_TD, step)

        # 2. attend over all that is remembered
        out_THV = hidden_TD.new_empty((hidden_TD.shape[0], self.num_heads, self.value_dim))
        for segment in step.plan.segments:
            q_QHA = torch.cat((q_nope_THN[segment.rows], q_pe_THR[segment.rows]), dim=-1)
            out_THV[segment.rows] = self._attend_decompressed(q_QHA, step, segment)
        if step.plan.groups:
            rows = step.plan.absorbed_rows
            out_THV[rows] = self._attend_absorbed(q_nope_THN[rows], q_pe_THR[rows], step)

        # 3. back to the hidden size
        out_TD: Tensor = self.o_proj(out_THV.flatten(1))
        return out_TD

    def _queries_and_latents(self, hidden_TD: Tensor, step: AttentionStep) -> tuple[Tensor, Tensor]:
        """Write this step's latents into the pool; return q_nope [T, H, N] and q_pe [T, H, R]."""
        latents: Tensor = self.qkv_a_proj(hidden_TD)
        q_c, kv_c_TC, k_pe_TR = latents.split_with_sizes(
            (self.q_lora_rank, self.kv_lora_rank, self.rope_dim), dim=-1
        )
        if self.q_lora_rank:
            q_THA = self._per_head(self.q_b_proj(self.q_a_layernorm(q_c)))
        else:
            q_THA = self._per_head(self.q_proj(hidden_TD))
        q_nope_THN, q_pe_THR = q_THA.split_with_sizes((self.nope_dim, self.rope_dim), dim=-1)
        q_pe_THR = reference.apply_rotary(q_pe_THR, step.cos, step.sin, interleave=self.interleave)
        k_pe_TR = reference.apply_rotary(k_pe_TR, step.cos, step.sin, interleave=self.interleave)
        kv_c_TC = self.kv_a_layernorm(kv_c_TC)
        step.kv_pool.write(self.layer_index, step.slot_mapping, kv_c_TC, k_pe_TR)
        return q_nope_THN, q_pe_THR

    def _attend_decompressed(
        self, q_QHA: Tensor, step: AttentionStep, segment: DecompressedSegment
    ) -> Tensor:
        """Expand one sequence's latents to keys and values, and attend: [Q, H, V]."""
        latents_PL = step.gather(self.layer_index, segment.block_ids, q_QHA.dtype)
        latents_PL = latents_PL[: segment.num_positions]
        kv_c_PC, k_pe_PR = latents_PL.split_with_sizes((self.kv_lora_rank, self.rope_dim), dim=-1)
        k_nope_PHN, v_PHV = self._per_head(self.kv_b_proj(kv_c_PC)).split_with_sizes(
            (self.nope_dim, self.value_dim), dim=-1
        )
        k_pe_PHR = k_pe_PR.unsqueeze(1).expand(-1, self.num_heads, -1)
        k_PHA = torch.cat((k_nope_PHN, k_pe_PHR), dim=-1)
        return reference.causal_attention(q_QHA, k_PHA, v_PHV, self.scale)

    def _attend_absorbed(self, q_nope_THN: Tensor, q_pe_THR: Tensor, step: AttentionStep) -> Tensor:
        """Attend in the latent space, all groups' rows at once where they allow: [T, H, V]."""
        w_uk_HNC, w_uv_HVC = self._up_projections()
        q_c_HTC = torch.bmm(q_nope_THN.transpose(0, 1), w_uk_HNC)
        q_THL = torch.cat((q_c_HTC.transpose(0, 1), q_pe_THR), dim=-1)
        out_THC = q_THL.new_empty((*q_THL.shape[:2], self.kv_lora_rank))
        for group in step.plan.groups:
            num_seqs, num_queries, _ = group.hidden_SQP.shape
            attended = reference.absorbed_attention(
                q_THL[group.rows].view(num_seqs, num_queries, self.num_heads, -1),
                step.gather_group(self.layer_index, group, q_THL.dtype),
                group.hidden_SQP,
                self.kv_lora_rank,
                self.scale,
            )
            out_THC[group.rows] = attended.flatten(0, 1)
        return torch.bmm(out_THC.transpose(0, 1), w_uv_HVC.transpose(1, 2)).transpose(0, 1)

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """Return views of kv_b_proj per head: W_UK [H, N, C] and W_UV [H, V, C]."""
        per_head = self.kv_b_proj.weight.view(self.num_heads, -1, self.kv_lora_rank)
        w_uk_HNC, w_uv_HVC = per_head.split_with_sizes((self.nope_dim, self.value_dim), dim=1)
        return w_uk_HNC, w_uv_HVC

    def _per_head(self, x: Tensor) -> Tensor:
        """View [T, H * n] as [T, H, n]."""
        return x.view(x.shape[0], self.num_heads, x.shape[1] // self.num_heads)
