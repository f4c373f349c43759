"""Llama as one page: embed, decoder layers of attention and feed-forward, norm, head.

Dense, with grouped-query attention; reads as a model on one device. Sharding is inside the layers,
keys and values are in a pool that attention writes and reads. Module names are those of the
checkpoint, so that a parameter's path says where its weights come from. See arXiv:2407.21783.

Legend: T tokens of the step (all requests one after another), D hidden size, L rows whose logits
are wanted.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from engine.attention.backend import AttentionBackend
from engine.attention.grouped import GroupedAttention, GroupedStep, KeysValues
from engine.attention.kv_spec import KVSpec
from engine.batch import ForwardBatch
from engine.execution import Execution
from engine.kernels.create import create_kernels
from engine.kernels.rotation import Rotation
from engine.layers.context import LayerContext
from engine.layers.embedding import LMHead, VocabEmbedding
from engine.layers.grouped_query import GroupedQueryAttention, HeadSizes, RotatedStep
from engine.layers.mlp import MLP
from engine.layers.norm import FeedFormat, Residual, RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.memory.kv_pool import KVPool
from engine.model.llama_config import LlamaConfig
from engine.model.spec import BuildOptions, check_dims
from engine.operations import Operations, do_nothing, run
from engine.weights.slices import HoldsWeights, WeightSlice
from runtime.errors import ConfigError

Backend = AttentionBackend[GroupedStep, KeysValues, Tensor]


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(
        self, config: LlamaConfig, ctx: LayerContext, backend: Backend, index: int
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        heads = HeadSizes(
            queries=config.num_attention_heads,
            keys=config.num_key_value_heads,
            width=config.head_dim,
        )
        self.input_layernorm = RMSNorm(ctx, hidden, eps)
        self.self_attn = GroupedQueryAttention(
            ctx.within("self_attn"), hidden, heads, backend, index
        )
        self.post_attention_layernorm = RMSNorm(ctx, hidden, eps)
        self.mlp = MLP(ctx.within("mlp"), hidden, config.intermediate_size)

    def forward(self, stream: Residual, step: RotatedStep) -> Operations[Residual]:
        """Map this rank's rows of the stream to the same rows."""
        rows, normed = self.input_layernorm.add(stream, FeedFormat.PLAIN)
        attended = yield from self.self_attn(normed.plain, step)
        rows, normed = self.post_attention_layernorm.add(
            Residual(rows, attended), self.mlp.feed_format
        )
        out = yield from self.mlp(normed)
        return Residual(rows, out)


class LlamaModel(nn.Module):
    """Everything but the head."""

    def __init__(self, config: LlamaConfig, ctx: LayerContext, backend: Backend) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(ctx, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, ctx.within(f"model.layers.{index}"), backend, index)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)


class LlamaForCausalLM(nn.Module):
    """The model on one rank; its weights are uninitialised until a loader has filled them.

    See `ServedModel` for what it says of itself.
    """

    with_mtp = False
    attention_rule = None
    waits_for_counts = False
    unused_prefixes: tuple[str, ...] = ()

    def __init__(self, config: LlamaConfig, options: BuildOptions) -> None:
        """Allocate the parameters of this rank.

        Raises:
            ConfigError: the axes do not divide the model, or steps were to run in halves.
        """
        super().__init__()
        self.config, self.dtype, self.device = config, options.dtype, options.device
        self.groups = options.groups
        check_dims(self.groups.dims, config)
        self.kernels = options.kernels or create_kernels(self.device, self.dtype)
        self.number_format = self.kernels.formats.plain
        execution = options.execution or Execution()
        if execution.overlap is not None:
            problem = f"{config.architecture} runs every step whole"
            raise ConfigError("two_batch_overlap", "on", problem, '"auto" or "off"')
        ctx = self._context(execution)
        self.attention = GroupedAttention(
            config.kv_spec.on_rank(self.groups.dims.tp), config.head_dim**-0.5
        )
        self.model = LlamaModel(config, ctx, self.attention)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(ctx, config.vocab_size, config.hidden_size, tied_to=tied_to)
        self._sharding = ctx.sharding
        self._rotary = RotaryEmbedding(inverse_frequencies(config).to(self.device))

    def _context(self, execution: Execution) -> LayerContext:
        """Return what the layers are built with."""
        dims, scatter = self.groups.dims, execution.scatter_tokens
        return LayerContext(
            dtype=self.dtype,
            device=self.device,
            groups=self.groups,
            kernels=self.kernels,
            scatter_tokens=dims.tp > 1 and dims.ep > 1 if scatter is None else scatter,
        )

    @property
    def kv_spec(self) -> KVSpec:
        """What a token leaves in each layer on this rank."""
        return self.attention.kv_spec

    def forward(
        self,
        batch: ForwardBatch,
        kv_pool: KVPool,
        *,
        on_layer_done: Callable[[int], None] | None = None,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> Tensor:
        """Run one step; the keys and values of its tokens are in the pool afterwards.

        Args:
            batch: of the step; a rank without requests runs `ForwardBatch.dummy()`.
            kv_pool: on the same device, with a layer for each decoder layer.
            on_layer_done: called with a layer's index after that layer has written what it keeps.
            meanwhile: called several times a layer, between two operations.

        Returns:
            [T, D], after the final norm.
        """
        return run(self._operations(batch, kv_pool, on_layer_done), meanwhile)

    def _operations(
        self, batch: ForwardBatch, kv_pool: KVPool, on_layer_done: Callable[[int], None] | None
    ) -> Operations[Tensor]:
        cos, sin = self._rotary(batch.positions)
        step = RotatedStep(
            plan=self.attention.plan(batch, kv_pool),
            rotation=Rotation(cos=cos, sin=sin, interleave=False),
        )
        stream = Residual(self.model.embed_tokens(self._sharding.take(batch.input_ids)))
        for index, layer in enumerate(self.model.layers):
            stream = yield from layer(stream, step)
            if on_layer_done is not None:
                on_layer_done(index)
        _, normed = self.model.norm.add(stream, FeedFormat.PLAIN)
        gathering = self._sharding.start_gather(normed.plain, batch.num_tokens)
        yield
        return gathering.wait()

    def compute_logits(self, hidden_LD: Tensor) -> Tensor:
        """Map final hidden states [L, D] to float32 logits [L, vocab_size]; no collective."""
        logits: Tensor = self.lm_head(hidden_LD)
        return logits

    def prepare(self) -> None:
        """Nothing is derived from the weights."""

    def weight_slices(self, prefix: str = "") -> Iterator[WeightSlice]:
        """Yield the load plan of the whole model on this rank."""
        for name, module in self.named_modules(prefix=prefix):
            if module is not self and isinstance(module, HoldsWeights):
                yield from module.weight_slices(name)


def inverse_frequencies(config: LlamaConfig) -> Tensor:
    """Return radians per position of each pair, [head_dim / 2] float32, plain or scaled.

    Scaled as in Llama 3.1 (arXiv:2407.21783; `rope_type = "llama3"`): pairs that turn often over
    the trained context stay, those that turn seldom are slowed by a factor, and between the two it
    goes by the number of turns.
    """
    dim = config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    trained = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return trained
    turns = scaling.original_max_position_embeddings * trained / (2 * math.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / width).clamp(0, 1)
    return trained * (keep + (1 - keep) / scaling.factor)
