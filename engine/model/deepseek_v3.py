"""DeepSeek-V3 as one page: embed, decoder layers of attention and feed-forward, norm, head.

Reads as a model on one device. Sharding is inside the layers, tokens travel inside the MoE's
dispatcher, the KV cache is a pool that attention writes and reads. A step may run as two
micro-batches in turns (`engine.operations`). Module names are those of the
checkpoint, so that a parameter's path says where its weights come from. See arXiv:2412.19437.

Legend: T tokens of the step (all requests one after another), D hidden size, L rows whose logits
are wanted.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.asking_rows import LastRows
from engine.attention.attention_plan import AttentionStep
from engine.attention.attention_rule import AttentionRule
from engine.attention.kv_spec import KVSpec
from engine.attention.latent import LatentAttention
from engine.batch import ForwardBatch
from engine.config import DeepseekV3Config
from engine.execution import Execution
from engine.experts.placements import ExpertPlacements
from engine.hf_config.quantization import ModulePatterns
from engine.kernels.base import Kernels
from engine.kernels.create import create_kernels
from engine.kernels.launches import choose_launches
from engine.layers.context import LayerContext
from engine.layers.embedding import LMHead, VocabEmbedding
from engine.layers.mla import MLA
from engine.layers.moe import MoE, create_expert_dispatcher
from engine.layers.norm import FeedFormat, Residual, RMSNorm
from engine.memory.kv_pool import KVPool
from engine.micro_batches import OverlapRule, halve
from engine.model.decoder_layer import DecoderLayer
from engine.model.mtp import MTPLayer
from engine.model.spec import check_dims
from engine.operations import Operations, do_nothing, interleave, run
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups
from engine.parallel.token_dispatcher import TokenDispatcher
from engine.weights.expert_format import experts_are_quantized
from engine.weights.slices import HoldsWeights, WeightSlice


class DeepseekV3Model(nn.Module):
    """Everything but the head; MTP layers, if any, stand in `layers` after the decoder layers."""

    def __init__(
        self,
        config: DeepseekV3Config,
        ctx: LayerContext,
        attention: LatentAttention,
        *,
        placements: ExpertPlacements,
        dispatcher: TokenDispatcher[Any],
        with_mtp: bool = False,
    ) -> None:
        super().__init__()
        num_layers = config.num_hidden_layers
        self.embed_tokens = VocabEmbedding(ctx, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            (DecoderLayer if index < num_layers else MTPLayer)(
                config,
                ctx.within(f"model.layers.{index}"),
                attention,
                index,
                placements=placements,
                dispatcher=dispatcher,
            )
            for index in range(config.num_kv_layers(with_mtp=with_mtp))
        )
        self.norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)


class DeepseekV3ForCausalLM(nn.Module):
    """The model on one rank; its weights are uninitialised until a loader has filled them.

    Attributes:
        config: of the model.
        dtype: of weights and activations.
        device: of weights and activations.
        groups: the ranks that share the model.
        with_mtp: whether the MTP layers were built.
        kernels: that the layers call.
        number_format: of the weights that the checkpoint quantises.
        attention: what the pool keeps, and how a step attends.
    """

    def __init__(
        self,
        config: DeepseekV3Config,
        groups: ProcessGroups | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        with_mtp: bool = False,
        placements: ExpertPlacements | None = None,
        attention_rule: AttentionRule | None = None,
        kernels: Kernels | None = None,
        execution: Execution | None = None,
    ) -> None:
        """Allocate the parameters of this rank.

        Args:
            config: of the model.
            groups: the ranks that share it; None for one process.
            dtype: compute dtype; weights of a format that the kernels lack are dequantised into it.
            device: where everything is.
            with_mtp: build the multi-token-prediction layers too.
            placements: slots of the routed experts of each layer; None for one each.
            attention_rule: when attention is absorbed; None for the cheaper form by arithmetic.
            kernels: None for the fastest of the device; weights of their formats stay as they are.
            execution: how steps run on several ranks; None for what fits `groups`.

        Raises:
            ConfigError: the axes do not divide the model, or some routed experts are quantised
                and others are not.
        """
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.groups, self.with_mtp = groups or ProcessGroups(), with_mtp
        num_experts, layers = config.n_routed_experts, config.expert_layers(with_mtp=with_mtp)
        placements = placements or ExpertPlacements.alike(
            range(num_experts), num_experts, layers=layers, device=device
        )
        num_slots = placements.num_physical_experts
        check_dims(self.groups.dims, config, num_physical_experts=num_slots)
        self.kernels = kernels or create_kernels(self.device, dtype)
        execution = execution or Execution()
        ctx = self._context(execution)
        self.number_format = ctx.number_format
        dispatcher = execution.dispatcher or create_expert_dispatcher(config, ctx, num_slots)
        rule = attention_rule or AttentionRule.of(config, tp=self.groups.dims.tp)
        self.attention = LatentAttention(config, self.kernels, self.device, rule)
        self.model = DeepseekV3Model(
            config,
            ctx,
            self.attention,
            placements=placements,
            dispatcher=dispatcher,
            with_mtp=with_mtp,
        )
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(ctx, config.vocab_size, config.hidden_size, tied_to=tied_to)
        self._launches = choose_launches(self.device, are_dependent=execution.dependent_launches)
        self._overlap, self._sharding = execution.overlap, ctx.sharding

    def _context(self, execution: Execution) -> LayerContext:
        """Return what the layers are built with.

        Raises:
            ConfigError: only some routed experts are quantised.
        """
        config, dims, scatter = self.config, self.groups.dims, execution.scatter_tokens
        number_format = self.kernels.formats.of(config)
        if number_format.is_quantized:
            experts_are_quantized(config, with_mtp=self.with_mtp)  # all of them or none
        return LayerContext(
            dtype=self.dtype,
            device=self.device,
            groups=execution.exchanging(self.groups),
            kernels=self.kernels,
            number_format=number_format,
            unquantized=ModulePatterns(config.unquantized_modules),
            scatter_tokens=dims.tp > 1 and dims.ep > 1 if scatter is None else scatter,
            overlap_shared_expert=execution.overlap_shared_expert,
            side_stream=execution.side_stream,
            side_rule=execution.side_rule,
        )

    def forward(
        self,
        batch: ForwardBatch,
        kv_pool: KVPool,
        *,
        on_layer_done: Callable[[int], None] | None = None,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> Tensor:
        """Run one step; the latents of its tokens are in the pool afterwards.

        Args:
            batch: of the step; a rank without requests runs `ForwardBatch.dummy()`.
            kv_pool: on the same device, with a layer for each decoder layer.
            on_layer_done: called with a layer's index after that layer has written its latents
                for all of the step's tokens (on a GPU: has been launched to).
            meanwhile: called several times a layer, between two operations.

        Returns:
            [T, D], after the final norm.
        """
        with self._launching(batch):
            return self._run(batch, kv_pool, on_layer_done, meanwhile)

    def _run(
        self,
        batch: ForwardBatch,
        kv_pool: KVPool,
        on_layer_done: Callable[[int], None] | None,
        meanwhile: Callable[[], None],
    ) -> Tensor:
        """Run one step, as one or two micro-batches."""
        parts = _split(batch, self._overlap, self.groups.dims)
        layer_done = _when_all_have_called(len(parts), on_layer_done)
        operations = [self._operations(part, kv_pool, layer_done) for part in parts]
        if self._overlap is None or len(operations) == 1:
            return run(operations[0], meanwhile)
        halves = interleave(*operations, lag=self._overlap.lag, meanwhile=meanwhile)
        return torch.cat(halves)[: batch.num_tokens]

    def _operations(
        self, batch: ForwardBatch, kv_pool: KVPool, layer_done: Callable[[int], None]
    ) -> Operations[Tensor]:
        """Run one micro-batch: [T, D], after the final norm."""
        step = self._plan(batch, kv_pool)
        own_ids = self._sharding.take(batch.input_ids)
        stream = Residual(self.model.embed_tokens(own_ids))
        for index, layer in enumerate(self.model.layers[: self.config.num_hidden_layers]):
            stream = yield from layer(stream, step)
            layer_done(index)
        _, normed = self.model.norm.add(stream, FeedFormat.PLAIN)
        gathering = self._sharding.start_gather(normed.plain, batch.num_tokens)
        yield
        return gathering.wait()

    def _plan(self, batch: ForwardBatch, kv_pool: KVPool) -> AttentionStep:
        """Plan what layers share of a step, of whose rows on this rank some may be padding."""
        own_rows = self._sharding.count(batch.num_rows, batch.num_tokens)
        return replace(self.attention.plan(batch, kv_pool), num_rows=own_rows)

    def _launching(self, batch: ForwardBatch) -> AbstractContextManager[None]:
        """Return in what the kernels of a step are launched: short ones in the chosen way."""
        return self._launches() if batch.is_short else nullcontext()

    def compute_logits(self, hidden_LD: Tensor) -> Tensor:
        """Map final hidden states [L, D] to float32 logits [L, vocab_size]; no collective."""
        logits: Tensor = self.lm_head(hidden_LD)
        return logits

    def forward_mtp(
        self,
        hidden: Tensor,
        next_ids: Tensor,
        batch: ForwardBatch,
        kv_pool: KVPool,
        last: LastRows | None = None,
    ) -> Tensor:
        """Run the first MTP layer: from a token and its successor, predict the one after.

        Args:
            hidden: [T, D], what `forward` returned for the tokens of `batch`; or this, for the
                tokens before them, where those of `batch` are guesses themselves.
            next_ids: [T] int64, the token that follows each of them.
            batch: positions, slots and contexts of the tokens themselves (not of the successors).
            kv_pool: with one layer more than the decoder has.
            last: the rows that are to guess; None for all of them. The KV is written of all.

        Returns:
            [T, D] ([S, D] of last rows), whose logits then score the token after `next_ids`.
        """
        layer, sharding, num_rows = self._mtp_layer(), self._sharding, batch.num_tokens
        with self._launching(batch):
            step, take = self._plan(batch, kv_pool), sharding.take
            if last is not None:
                num_rows, take = len(last.place_S), partial(last.take, sharding)
                own_rows = sharding.count(last.num_seqs, num_rows)
                step = replace(step, asking=last.asking(sharding), num_rows=own_rows)
            embedded = self.model.embed_tokens(take(next_ids))
            normed = run(layer.draft(embedded, take(hidden), step))
            return sharding.start_gather(normed, num_rows).wait()

    def remember_mtp(
        self, hidden: Tensor, next_ids: Tensor, batch: ForwardBatch, kv_pool: KVPool
    ) -> None:
        """Write the KV of the first MTP layer and do nothing else; see `forward_mtp`."""
        layer, take = self._mtp_layer(), self._sharding.take
        with self._launching(batch):
            step = self._plan(batch, kv_pool)
            layer.remember(self.model.embed_tokens(take(next_ids)), take(hidden), step)

    def _mtp_layer(self) -> MTPLayer:
        assert self.with_mtp, "the model was built without its MTP layers"
        layer = self.model.layers[self.config.num_hidden_layers]
        assert isinstance(layer, MTPLayer)
        return layer

    @property
    def kv_spec(self) -> KVSpec:
        """What a token leaves in each layer on this rank."""
        return self.attention.kv_spec

    @property
    def attention_rule(self) -> AttentionRule:
        """When attention is absorbed, and how much of it at a time."""
        return self.attention.rule

    @property
    def waits_for_counts(self) -> bool:
        """Whether launching a step waits, layer by layer, for what the device has counted.

        Then a launch takes as long as the step. On a CPU a launch does the step's work itself.
        """
        experts = (module for module in self.modules() if isinstance(module, MoE))
        waits = (layer.dispatcher.waits_for_counts for layer in experts)
        return self.device.type == "cuda" and any(waits)

    @property
    def unused_prefixes(self) -> tuple[str, ...]:
        """Checkpoint names that are known and left out on purpose."""
        return _unused_prefixes(self.config, self.with_mtp)

    def prepare(self) -> None:
        """Make the weights of absorbed attention (kv_b_proj in the compute dtype), after loading.

        They would be made in the first step that needs them; a step that is captured cannot.
        """
        for module in self.modules():
            if isinstance(module, MLA):
                module.prepare_absorption()

    def weight_slices(self, prefix: str = "") -> Iterator[WeightSlice]:
        """Yield the load plan of the whole model on this rank."""
        for name, module in self.named_modules(prefix=prefix):
            if module is not self and isinstance(module, HoldsWeights):
                yield from module.weight_slices(name)


def _split(
    batch: ForwardBatch, overlap: OverlapRule | None, dims: ParallelDims
) -> tuple[ForwardBatch, ...]:
    """Return the micro-batches of a step: one, or two if they are to overlap."""
    if overlap is None or not batch.lengths:  # of fixed shape, and small
        return (batch,)
    is_collective = min(dims.dp, dims.ep) > 1
    if batch.num_tokens < overlap.min_tokens and not is_collective:
        return (batch,)
    return halve(batch)


def _unused_prefixes(config: DeepseekV3Config, with_mtp: bool) -> tuple[str, ...]:
    first, count = config.num_hidden_layers, config.num_nextn_predict_layers
    layers = [f"model.layers.{index}." for index in range(first, first + count)]
    if not with_mtp:
        return tuple(layers)
    # The MTP layers share embedding and head with the model; checkpoints repeat them.
    parts = ("embed_tokens.", "shared_head.head.")
    return tuple(layer + part for layer in layers for part in parts)


def _when_all_have_called(
    num_callers: int, call: Callable[[int], None] | None
) -> Callable[[int], None]:
    """Return a function that calls with an index once `num_callers` have called it with that."""
    counts: dict[int, int] = {}

    def count(index: int) -> None:
        counts[index] = counts.get(index, 0) + 1
        if call is not None and counts[index] == num_callers:
            call(index)

    return count
