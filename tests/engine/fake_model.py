"""A model of a few lines whose logits depend on every token in the KV, for tests without weights.

It writes each token's latent (a hash of token and position) into the KV pool, and its hidden state
is the sum, over the context read back through the block table, of these latents weighted by the
distance. So a wrong slot, table, position or length changes the logits.
"""

from collections.abc import Callable

import torch

from engine.attention.kv_spec import KVSpec
from engine.attention.latent_storage import put_rows
from engine.batch import ForwardBatch
from engine.config import DeepseekV3Config
from engine.memory.kv_pool import KVPool
from engine.operations import do_nothing
from engine.runner import LayerDone

LATENT_DIM = 8


def make_config(vocab_size: int = 50, max_position_embeddings: int = 64) -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=vocab_size,
        hidden_size=LATENT_DIM,
        num_hidden_layers=2,
        num_attention_heads=1,
        max_position_embeddings=max_position_embeddings,
        q_lora_rank=None,
        kv_lora_rank=LATENT_DIM - 2,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=4,
        intermediate_size=8,
        first_k_dense_replace=2,
        moe_intermediate_size=8,
        n_routed_experts=1,
        n_shared_experts=0,
        num_experts_per_tok=1,
    )


class FakeModel:
    """Two "layers" that write the same latents; logits are products with a fixed random matrix."""

    def __init__(self, config: DeepseekV3Config | None = None) -> None:
        self.config = config or make_config()
        generator = torch.Generator().manual_seed(0)
        shape = (self.config.vocab_size, LATENT_DIM)
        self.embedding = torch.randn(shape, generator=generator)
        self.head = torch.randn(shape, generator=generator)
        self.logits_calls: list[int] = []
        self.batches: list[ForwardBatch] = []

    @property
    def kv_spec(self) -> KVSpec:
        return self.config.kv_spec

    def forward(
        self,
        batch: ForwardBatch,
        kv_pool: KVPool,
        *,
        on_layer_done: LayerDone | None = None,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> torch.Tensor:
        self.batches.append(batch)
        latents = self.embedding[batch.input_ids] + torch.sin(batch.positions)[:, None]
        for layer in range(kv_pool.num_layers):
            put_rows(kv_pool.layer(layer), batch.slot_mapping, latents)
            if on_layer_done is not None:
                on_layer_done(layer)
            meanwhile()
        hidden = torch.empty(batch.num_tokens, LATENT_DIM)
        pages = kv_pool.layer(1)
        for seq in range(batch.num_seqs):
            context = pages[batch.block_tables[seq].long()].flatten(0, 1)
            first, end = batch.cu_seqlens_q[seq : seq + 2].tolist()
            for row in range(first, end):
                seen = int(batch.seq_lens[seq]) - (end - 1 - row)
                decay = 0.8 ** torch.arange(seen - 1, -1, -1.0)
                hidden[row] = decay @ context[:seen].float()
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.logits_calls.append(len(hidden))
        return hidden.float() @ self.head.T
