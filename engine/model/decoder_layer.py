"""One decoder layer: attention, then a dense or a mixture-of-experts feed-forward network."""

from torch import Tensor, nn

from engine.config import ModelConfig
from engine.layers.attention_plan import AttentionStep
from engine.layers.context import LayerContext
from engine.layers.mla import MLA
from engine.layers.mlp import MLP
from engine.layers.moe import MoE
from engine.layers.norm import RMSNorm
from engine.parallel.expert_placement import ExpertPlacement


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(
        self, config: ModelConfig, ctx: LayerContext, index: int, placement: ExpertPlacement
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLA(config, ctx, index)
        self.post_attention_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.mlp: MLP | MoE
        if index < config.first_k_dense_replace:
            self.mlp = MLP(ctx, config.hidden_size, config.intermediate_size)
        else:
            self.mlp = MoE(config, ctx, placement)

    def forward(self, hidden_TD: Tensor, step: AttentionStep) -> Tensor:
        """Map [T, D] to [T, D]."""
        attention = self.self_attn
        attended_TD = attention(self.input_layernorm.feed(hidden_TD, fp8=attention.is_fp8), step)
        hidden_TD, normed_TD = self.post_attention_layernorm.add(hidden_TD, attended_TD)
        out_TD: Tensor = hidden_TD + self.mlp(normed_TD)
        return out_TD
