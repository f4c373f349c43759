"""What an architecture says of itself to be served: one `ModelSpec` of `engine.model.registry`.

Three contracts. `CommonConfig` is what everybody but the model itself asks of a `config.json`: the
rest of it is the architecture's own, in a class of its own. `ServedModel` is what boot, runner,
loader and budgets ask of a model. `ModelSpec` joins the two: it reads the one and builds the other.
Nothing here needs torch, so that a configuration can be checked without loading it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from engine.attention.kv_spec import KVSpec
from runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from engine.asking_rows import LastRows
    from engine.attention.attention_rule import AttentionRule
    from engine.batch import ForwardBatch
    from engine.config import DeepseekV3Config
    from engine.execution import Execution
    from engine.experts.placements import ExpertPlacements
    from engine.formats.base import NumberFormat
    from engine.kernels.base import Kernels
    from engine.memory.kv_pool import KVPool
    from engine.parallel.dims import ParallelDims
    from engine.parallel.groups import ProcessGroups
    from engine.weights.slices import WeightSlice


class CommonConfig(Protocol):
    """What a model's configuration says to everybody; immutable."""

    @property
    def architecture(self) -> str:
        """As `architectures` of the `config.json` names it; the key of the registry."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        ...

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state."""
        ...

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers, MTP layers not counted."""
        ...

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Most tokens of a sequence."""
        ...

    @property
    def num_nextn_predict_layers(self) -> int:
        """MTP layers; 0 for none."""
        ...

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the embedding is the head, too."""
        ...

    @property
    def fp8_block_size(self) -> int:
        """Edge of a block of scales if the checkpoint may hold FP8 weights, else 0."""
        ...

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences about the file, for people."""
        ...

    @property
    def kv_spec(self) -> KVSpec:
        """What a token leaves in each layer, of all heads."""
        ...

    @property
    def experts(self) -> DeepseekV3Config | None:
        """Sizes and routing of the experts; None for a dense model."""
        ...

    def expert_layers(self, *, with_mtp: bool = False) -> range:
        """Numbers of the layers with routed experts."""
        ...

    def num_kv_layers(self, *, with_mtp: bool = False) -> int:
        """Layers that the KV pool must hold."""
        ...

    def tp_sizes(self, *, whole_experts: bool) -> Mapping[str, int]:
        """What tensor parallelism divides, by field; experts too unless they stay whole."""
        ...

    def describe(self) -> Mapping[str, str]:
        """What is worth showing of the shape, by short names; "layers" among them."""
        ...


def num_experts(config: CommonConfig) -> int:
    """Return how many routed experts a model has."""
    return 0 if config.experts is None else config.experts.n_routed_experts


def check_dims(
    dims: ParallelDims, config: CommonConfig, *, num_physical_experts: int | None = None
) -> None:
    """Refuse a model that these dimensions cannot split evenly.

    Args:
        dims: of the ranks.
        config: of the model.
        num_physical_experts: expert slots, if not one per routed expert.

    Raises:
        ConfigError: naming the axis and a length that fits.
    """
    for name, size in config.tp_sizes(whole_experts=dims.ep > 1).items():
        _check_divides("tp", dims.tp, name, size)
    experts = num_physical_experts or num_experts(config)
    _check_divides("ep", dims.ep, "the number of physical experts", experts)


def _check_divides(axis: str, length: int, name: str, size: int) -> None:
    if size % length:
        fitting = [n for n in range(1, size + 1) if size % n == 0]
        below = max(n for n in fitting if n < length)
        above = min((n for n in fitting if n > length), default=None)
        fix = f"use {below}" if above is None else f"use {below} or {above}"
        raise ConfigError(axis, length, f"{name} = {size} is not a multiple of it", fix)


def num_expert_slots(
    config: CommonConfig, num_redundant: int, *, field: str = "num_redundant_experts"
) -> int:
    """Return the physical experts of a group of ranks: each expert once, and redundant ones.

    Args:
        config: of the model.
        num_redundant: slots for second copies.
        field: that says so, such as "decode.num_redundant_experts".

    Raises:
        ConfigError: redundant ones of a model without experts.
    """
    if num_redundant and not num_experts(config):
        problem = f"{config.architecture} has no experts"
        raise ConfigError(field, num_redundant, problem, "use 0")
    return num_experts(config) + num_redundant


class ServedModel(Protocol):
    """One rank's model, a `torch.nn.Module`, as boot, runner and budgets see it."""

    @property
    def config(self) -> CommonConfig:
        """Of the model."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        ...

    @property
    def device(self) -> torch.device:
        """Of weights and activations."""
        ...

    @property
    def groups(self) -> ProcessGroups:
        """The ranks that share the model."""
        ...

    @property
    def kernels(self) -> Kernels:
        """That the layers call."""
        ...

    @property
    def with_mtp(self) -> bool:
        """Whether the MTP layers were built."""
        ...

    @property
    def number_format(self) -> NumberFormat:
        """Of the weights that the checkpoint quantises; the plain one if they are dequantised."""
        ...

    @property
    def kv_spec(self) -> KVSpec:
        """What a token leaves in each layer on this rank."""
        ...

    @property
    def attention_rule(self) -> AttentionRule | None:
        """When attention takes which of MLA's forms; None for attention of one form."""
        ...

    @property
    def waits_for_counts(self) -> bool:
        """Whether launching a step waits for what the device has counted."""
        ...

    @property
    def unused_prefixes(self) -> tuple[str, ...]:
        """Checkpoint names that are known and left out on purpose."""
        ...

    def forward(
        self,
        batch: ForwardBatch,
        kv_pool: KVPool,
        *,
        on_layer_done: Callable[[int], None] | None = None,
        meanwhile: Callable[[], None] = ...,
    ) -> Tensor:
        """See `engine.runner.CausalModel`."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `engine.runner.CausalModel`."""
        ...

    def prepare(self) -> None:
        """Make what steps derive from weights, after loading; a captured step must find it."""
        ...

    def weight_slices(self) -> Iterator[WeightSlice]:
        """Yield the load plan of this rank."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """See `torch.nn.Module`."""
        ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """See `torch.nn.Module`."""
        ...

    def eval(self) -> Self:
        """See `torch.nn.Module`."""
        ...


class DraftingModel(Protocol):
    """What steps with drafts need of a model that was built with its MTP layers."""

    def forward(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """See `engine.runner.CausalModel`."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `engine.runner.CausalModel`."""
        ...

    def forward_mtp(
        self,
        hidden: Tensor,
        next_ids: Tensor,
        batch: ForwardBatch,
        kv_pool: KVPool,
        last: LastRows | None = None,
    ) -> Tensor:
        """Guess the token after the next at each of a step's tokens, and write the layer's KV.

        Args:
            hidden: [T, D], final hidden states of the tokens; or what this returned for them,
                where their successors are guesses themselves.
            next_ids: [T] int64, the token that follows each of them.
            batch: of the tokens.
            kv_pool: with a layer more than the decoder has.
            last: the rows that are to guess, one a sequence; None for all.

        Returns:
            [T, D], for `compute_logits`; [S, D] of the last rows.
        """
        ...

    def remember_mtp(
        self, hidden: Tensor, next_ids: Tensor, batch: ForwardBatch, kv_pool: KVPool
    ) -> None:
        """Write the layer's KV of a step's tokens as `forward_mtp` would, and guess nothing.

        What a step without drafts owes the next one with some. No rank waits for another in it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How a rank's model is to be built, whatever its architecture.

    Attributes:
        groups: the ranks that share it.
        dtype: compute dtype.
        device: of this rank.
        with_mtp: build the multi-token-prediction layers.
        kernels: that it runs on; None for the fastest of the device.
        placements: slots of the routed experts of each layer; None for one each.
        execution: how steps run on several ranks; None for what fits `groups`.
    """

    groups: ProcessGroups
    dtype: torch.dtype
    device: torch.device
    with_mtp: bool = False
    kernels: Kernels | None = None
    placements: ExpertPlacements | None = None
    execution: Execution | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One architecture.

    Attributes:
        architecture: as `architectures` of a `config.json` names it.
        model_type: as its `model_type` does.
        read: makes a configuration of the content of a `config.json`; ConfigError for another
            architecture, or for what is not implemented.
        build: makes this rank's model of such a configuration, with uninitialised weights; loads
            the module of the model only then.
        lacks_on_cuda: what is missing to run it on a GPU; empty for nothing.
    """

    architecture: str
    model_type: str
    read: Callable[[Mapping[str, object]], CommonConfig]
    build: Callable[[CommonConfig, BuildOptions], ServedModel]
    lacks_on_cuda: str = ""

    def check_device(self, field: str, device: str) -> None:
        """Refuse a device that the architecture does not run on.

        Args:
            field: that says it, such as "decode.device".
            device: "cpu" or "cuda".

        Raises:
            ConfigError: names the field, the architecture and what is missing.
        """
        if device == "cuda" and self.lacks_on_cuda:
            problem = f"{self.architecture} has no {self.lacks_on_cuda}"
            raise ConfigError(field, device, problem, 'use "cpu", or another architecture')
