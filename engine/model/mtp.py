"""Multi-token prediction: one more decoder layer that guesses the token after the next.

Section 2.2 of the DeepSeek-V3 report. For a token t with final hidden state h_t, and its successor:
h' = layer(eh_proj([enorm(embed(t + 1)); hnorm(h_t)])), and the model's own head reads norm(h') as
the logits of token t + 2. Embedding and head are the model's, so the layer has neither. Its latents
have a layer of their own in the KV pool, at the position of token t.
"""

from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.attention_plan import AttentionStep
from engine.attention.latent import LatentAttention
from engine.config import DeepseekV3Config
from engine.experts.placements import ExpertPlacements
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear
from engine.layers.norm import FeedFormat, Residual, RMSNorm
from engine.model.decoder_layer import DecoderLayer
from engine.operations import Operations
from engine.parallel.token_dispatcher import TokenDispatcher


class SharedHead(nn.Module):
    """The norm before the head that is shared with the model."""

    def __init__(self, config: DeepseekV3Config, ctx: LayerContext) -> None:
        super().__init__()
        self.norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)


class MTPLayer(DecoderLayer):
    """Decoder layer `index` (counted on after the model's own) with its projection and norms.

    A subclass, because the checkpoint names the parts of both side by side.
    """

    def __init__(
        self,
        config: DeepseekV3Config,
        ctx: LayerContext,
        attention: LatentAttention,
        index: int,
        *,
        placements: ExpertPlacements,
        dispatcher: TokenDispatcher[Any],
    ) -> None:
        super().__init__(
            config, ctx, attention, index, placements=placements, dispatcher=dispatcher
        )
        self.enorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.eh_proj = ColumnParallelLinear(
            ctx.unsplit, 2 * config.hidden_size, {"eh_proj": config.hidden_size}, quantized=False
        )
        self.shared_head = SharedHead(config, ctx)

    def draft(
        self, next_embedded_TD: Tensor, hidden_TD: Tensor, step: AttentionStep
    ) -> Operations[Tensor]:
        """Combine each token's hidden state with its successor's embedding, and run the layer.

        Args:
            next_embedded_TD: [t, D], embeddings of the successors of this rank's rows.
            hidden_TD: [t, D], the model's final hidden states of the rows.
            step: of all tokens.

        Returns:
            [t, D], normed for the head; [s, D] where only some rows of the step are asked about.
        """
        stream = yield from self(self._combined(next_embedded_TD, hidden_TD), step)
        _, normed = self.shared_head.norm.add(stream, FeedFormat.PLAIN)
        return normed.plain

    def remember(self, next_embedded_TD: Tensor, hidden_TD: Tensor, step: AttentionStep) -> None:
        """Write the KV that `draft` would write, and do nothing else; the arguments are its own.

        Takes no part in any exchange: the KV of a row depends on this row alone.
        """
        attention = self.self_attn
        stream = self._combined(next_embedded_TD, hidden_TD)
        _, normed = self.input_layernorm.add(stream, attention.feed_format)
        attention.remember(normed.feed, step)

    def _combined(self, next_embedded_TD: Tensor, hidden_TD: Tensor) -> Residual:
        both = torch.cat((self.enorm(next_embedded_TD), self.hnorm(hidden_TD)), dim=-1)
        return Residual(self.eh_proj(both))
