"""Attention to latents: what DeepSeek-V3 keeps of a token, and how the sequences of a step attend.

An `AttentionPlanner`; the layers store and attend themselves (`engine.layers.mla`), because both
are fused with their products: a latent is stored while the query's is normed, and the absorbed form
multiplies by the layer's `kv_b_proj` on either side.
"""

import logging
from dataclasses import replace
from functools import partial

import torch

from engine.attention.kv_spec import KVSpec
from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.kernels.base import Kernels
from engine.layers.attention_plan import (
    AttentionPlan,
    AttentionStep,
    plan_attention,
    plan_decode,
)
from engine.layers.attention_rule import AttentionRule
from engine.layers.rotary import RotaryEmbedding
from engine.layers.scratch import Scratch
from engine.memory.kv_pool import KVPool

logger = logging.getLogger(__name__)


class LatentAttention:
    """Plans steps for the kernels of one rank.

    Attributes:
        rule: when attention is absorbed, and how much of it at a time.
        device: of the model.
    """

    def __init__(
        self, config: ModelConfig, kernels: Kernels, device: torch.device, rule: AttentionRule
    ) -> None:
        self.rule, self.device = rule, device
        self._config, self._kernels, self._scratch = config, kernels, Scratch()
        self._rotary, self._is_refusal_told = RotaryEmbedding.of(config, device), False

    @property
    def kv_spec(self) -> KVSpec:
        """See `AttentionPlanner`; every rank keeps the latents whole."""
        return self._config.kv_spec

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> AttentionStep:
        """Return what all layers of a step share: plan, angles, slots, pool, padding."""
        cos, sin = self._rotary(batch.positions)
        return AttentionStep(
            plan=self._plan(batch, kv_pool),
            slot_mapping=batch.slot_mapping,
            cos=cos,
            sin=sin,
            kv_pool=kv_pool,
            scratch=self._scratch,
            num_rows=batch.num_rows,
        )

    def _plan(self, batch: ForwardBatch, kv_pool: KVPool) -> AttentionPlan:
        cache, kernels = kv_pool.layer(0), self._kernels
        num_heads = self.rule.heads
        refusal = kernels.why_no_pages(cache, self._config.kv_lora_rank)
        if batch.max_seqlen_q == 1 and not refusal:
            return plan_decode(batch, kernels, cache, num_heads)
        plan_pages = partial(kernels.plan_paged, cache=cache, num_heads=num_heads)
        if refusal:
            self._tell(refusal)
        if not batch.lengths and batch.num_seqs:
            # A step of fixed shape. On a GPU this waits for it, which no graph can hold: attending
            # over whole tables instead would cost as much as the longest context that may come.
            batch = replace(batch, lengths=tuple((1, n) for n in batch.seq_lens.tolist()))
        return plan_attention(
            batch,
            kv_pool.block_size,
            self.rule,
            max_positions=kernels.max_attention_positions,
            plan_pages=None if refusal else plan_pages,
        )

    def _tell(self, refusal: str) -> None:
        """Say once that a GPU attends by the reference."""
        if self.device.type == "cuda" and not self._is_refusal_told:
            self._is_refusal_told = True
            logger.warning("attention to the KV pool runs by the reference, slowly: %s", refusal)
