"""The model in training: the DeepSeek-V3 of `transformers`, with the MTP layer and fast experts.

Not the model that serves (that is `engine.model`): this one has no cache, no parallelism and no
FP8 arithmetic. The layers are the library's own, so the bundled checkpoint is DeepSeek-V3 by
construction. Ours are three things: the multi-token-prediction layer of the paper; a router kept
in float32 under autocast; and experts that run densely, every expert on every token with the
unrouted ones weighted zero. With 16 small experts that is two large GEMMs, and much faster than
sorting tokens, though it does four times the arithmetic.

Shape legend: B rows, S tokens of a row, H hidden, T = B * S, E experts, K experts per token,
I intermediate of an expert, V vocabulary.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3TopkRouter,
)


class TrainedModel(nn.Module):
    """Main model plus one multi-token-prediction (MTP) layer.

    The MTP layer at position t reads the main model's normed hidden state of t and the embedding of
    token t + 1, and predicts token t + 2. It shares the embedding and the output head.
    """

    def __init__(self, config: dict[str, object], dropout: float = 0.0) -> None:
        """Build randomly initialised layers.

        Args:
            config: content of a `config.json`.
            dropout: probability that a number is dropped where a branch joins the residual stream,
                and in the embedding; only in training mode.
        """
        super().__init__()
        self.config = library_config(config)
        self.config._attn_implementation = "sdpa"
        self.main = DeepseekV3ForCausalLM(self.config)
        self.mtp = MultiTokenPredictor(self.config)
        self.dropout = dropout
        for layer in (*self.main.model.layers, self.mtp.block):
            if layer.self_attn.layer_idx >= self.config.first_k_dense_replace:
                layer.mlp.experts = DenseExperts(self.config)
                layer.mlp.gate = Float32Router(self.config)
            # Hooks, not modules of our own, so that the parameters keep the library's names.
            layer.self_attn.o_proj.register_forward_hook(self._drop)
            layer.mlp.register_forward_hook(self._drop)
        _initialise(self, self.config.initializer_range, self.config.num_hidden_layers)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return main logits [B, S, V] and MTP logits [B, S - 1, V] for ids [B, S].

        Main logits at t are for token t + 1, MTP logits at t for token t + 2.
        """
        body = self.main.model
        embeddings = self._dropped(body.embed_tokens(ids))
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        rotary = body.rotary_emb(embeddings, positions)
        hidden = embeddings
        for layer in body.layers:
            hidden = layer(hidden, position_embeddings=rotary, attention_mask=None)
        hidden = body.norm(hidden)
        drafted = self.mtp(embeddings[:, 1:], hidden[:, :-1], [part[:, :-1] for part in rotary])
        return self.main.lm_head(hidden), self.main.lm_head(drafted)

    def _drop(self, _module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return self._dropped(output)

    def _dropped(self, states: Tensor) -> Tensor:
        return functional.dropout(states, self.dropout, training=self.training)

    def expert_layers(self) -> list["DenseExperts"]:
        """Return the routed experts of every MoE layer, the MTP layer last."""
        return [module for module in self.modules() if isinstance(module, DenseExperts)]

    def routers(self) -> list[DeepseekV3TopkRouter]:
        """Return the routers, in the order of `expert_layers`."""
        return [module for module in self.modules() if isinstance(module, DeepseekV3TopkRouter)]


class MultiTokenPredictor(nn.Module):
    """The extra decoder layer of the checkpoint, with its two norms and its projection."""

    def __init__(self, config: DeepseekV3Config) -> None:
        """Build the layer with the index that follows the last of the main model."""
        super().__init__()
        self.enorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.norm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embeddings: Tensor, hidden: Tensor, rotary: list[Tensor]) -> Tensor:
        """Return what the output head reads, [B, S - 1, H].

        Args:
            embeddings: [B, S - 1, H] of tokens 1 .. S - 1.
            hidden: [B, S - 1, H] normed states of tokens 0 .. S - 2.
            rotary: cosines and sines of positions 0 .. S - 2.
        """
        joined = torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1)
        states = self.block(self.eh_proj(joined), position_embeddings=rotary, attention_mask=None)
        return cast(Tensor, self.norm(states))


class DenseExperts(nn.Module):
    """All routed experts of a layer as two GEMMs, with the parameter layout of the library.

    Attributes:
        load: [E] float32 buffer, tokens routed to each expert since it was last zeroed.
    """

    def __init__(self, config: DeepseekV3Config) -> None:
        """Allocate [E, 2 I, H] and [E, H, I]."""
        super().__init__()
        experts, inner, hidden = (
            config.n_routed_experts,
            config.moe_intermediate_size,
            config.hidden_size,
        )
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.load: Tensor
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """Return the weighted sum of the routed experts, [T, H]."""
        num_experts, hidden_size, inner = self.down_proj.shape
        weights_TE = hidden_TH.new_zeros((len(hidden_TH), num_experts), dtype=torch.float32)
        weights_TE = weights_TE.scatter(1, topk_ids_TK, topk_weights_TK.float())
        with torch.no_grad():
            self.load.add_((weights_TE > 0).sum(0))
        gate_up = functional.linear(hidden_TH, self.gate_up_proj.flatten(0, 1))
        gate, up = gate_up.view(-1, num_experts, 2, inner).unbind(2)
        activated = functional.silu(gate) * up * weights_TE[..., None].to(gate.dtype)
        down = self.down_proj.transpose(0, 1).reshape(hidden_size, num_experts * inner)
        return functional.linear(activated.flatten(1), down)


class Float32Router(DeepseekV3TopkRouter):
    """The library's router, which autocast would otherwise run in bfloat16."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return router logits [T, E], weights [T, K] and ids [T, K]."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            routed = super().forward(hidden_states.float())  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, Tensor, Tensor], routed)


def library_config(config: dict[str, object]) -> DeepseekV3Config:
    """Return the library's config without the quantisation, which training does not have."""
    fields = {name: value for name, value in config.items() if name != "quantization_config"}
    return DeepseekV3Config.from_dict(fields)


def _initialise(model: TrainedModel, std: float, num_layers: int) -> None:
    """Draw every matrix from a normal law, those that end a residual branch from a narrower one."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        ends_branch = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
        narrow = (2 * num_layers) ** -0.5 if ends_branch else 1.0
        nn.init.normal_(parameter, std=std * narrow)
