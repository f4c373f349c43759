"""One decoder layer: attention, then a dense or a mixture-of-experts feed-forward network."""

from typing import Any

from torch import nn

from engine.attention.attention_plan import AttentionStep
from engine.attention.latent import LatentAttention
from engine.config import DeepseekV3Config
from engine.experts.placements import ExpertPlacements
from engine.layers.context import LayerContext
from engine.layers.mla import MLA
from engine.layers.mlp import MLP
from engine.layers.moe import MoE
from engine.layers.norm import Residual, RMSNorm
from engine.operations import Operations
from engine.parallel.token_dispatcher import TokenDispatcher


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

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
        super().__init__()
        self.input_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLA(config, ctx.within("self_attn"), attention, index)
        self.post_attention_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.mlp: MLP | MoE
        if index < config.first_k_dense_replace:
            self.mlp = MLP(ctx.within("mlp"), config.hidden_size, config.intermediate_size)
        else:
            placement = placements.of_layer(index)
            self.mlp = MoE(config, ctx.within("mlp"), placement, dispatcher)

    def forward(self, stream: Residual, step: AttentionStep) -> Operations[Residual]:
        """Map this rank's rows of the stream to the same rows, or to those that are asked about."""
        attention, mlp = self.self_attn, self.mlp
        rows, normed = self.input_layernorm.add(stream, attention.feed_format)
        attended = yield from attention(normed.feed, step)
        if step.asking is not None:
            rows = rows.index_select(0, step.asking.own_rows_s)
        stream = Residual(rows, attended)
        rows, normed = self.post_attention_layernorm.add(
            stream, mlp.feed_format, with_plain=isinstance(mlp, MoE)
        )
        if isinstance(mlp, MoE):
            out = yield from mlp(normed, step.num_rows)
        else:
            out = yield from mlp(normed)
        return Residual(rows, out)
