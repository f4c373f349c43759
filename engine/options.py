"""What the engine of one rank is told before it boots, in plain values.

Whoever makes a rank makes these: a worker of its section of the configuration, in one function
(`worker.engine_options`), a script or a test by hand. Nothing here opens, measures or allocates.
Which ranks share the model is said by `engine.parallel.dims.ParallelDims`.

The key idea: an engine knows no roles, it knows what its steps are like: chunks of any length, or
one token of each request in fixed shapes. Fields are called as whoever asked calls them, so that a
refusal can name the one to change: see `EngineOptions.named`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Literal

import torch

from engine.draft_choices import AUTO_DRAFTS, DraftChoices
from engine.graphs.buckets import batch_buckets
from runtime.errors import ConfigError


class Switch(StrEnum):
    """Whether something is done; what `AUTO` means is said where it is decided."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class DispatcherKind(StrEnum):
    """How tokens are dispatched to experts; see `engine.parallel.choose_dispatcher`.

    `COLLECTIVES` is what the process groups can do: nothing is opened. `NVLINK` and `GATHERED` are
    for steps of fixed shapes.
    """

    AUTO = "auto"
    NVLINK = "nvlink"
    DEEP_EP = "deep-ep"
    GATHERED = "gathered"
    COLLECTIVES = "collectives"


class TPExchangeKind(StrEnum):
    """How ranks that share heads send rows; see `engine.parallel.choose_tp_exchange`."""

    AUTO = "auto"
    NVLINK = "nvlink"
    COLLECTIVES = "collectives"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model of a rank.

    Attributes:
        path: folder of its checkpoint.
        load_format: where weights come from, a `engine.boot.build.LoadFormat`.
        dtype: of weights and activations.
        max_model_len: most tokens of prompt and output together; 0: all that the checkpoint knows.
        with_mtp: load the layers for multi-token prediction, and keep their KV.
    """

    path: str | Path
    load_format: str = "safetensors"
    dtype: torch.dtype = torch.float32
    max_model_len: int = 0
    with_mtp: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOptions:
    """The KV pool of a rank.

    Attributes:
        num_blocks: blocks, block 0 (padding) included; 0 on a GPU: as many as fit.
        block_size: tokens of a block.
        gpu_memory_fraction: of a GPU's memory, in (0, 1]: what the rank may take with everything;
            decides what 0 blocks are.
        dtype: of the storage; None for the model's.
    """

    num_blocks: int = 256
    block_size: int = 64
    gpu_memory_fraction: float = 0.92
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSteps:
    """Steps of chunks of prompts, of any length.

    Attributes:
        max_num_batched_tokens: most tokens of a step.
        two_batch_overlap: run a large step as two micro-batches, one computing while the other
            communicates.
        scatter_tokens: each rank of the tp axis keeps its share of the hidden states between
            layers; needs whole experts on each rank.
        cuda_graphs: capture steps of few tokens, one graph for each number of them, on a GPU.
        max_masked_tokens: most tokens of a step whose experts take rows in the masked layout, as in
            decode (`engine.parallel.short_rows`); 0 for none.
        overlap_shared_expert: run the shared expert while tokens travel; in steps that are captured
            on a stream of its own, on a GPU, beside routing too.
        dependent_launches: in steps that are captured, bring a kernel onto a Hopper GPU while the
            one before it runs (PDL).
        tp_exchange: how the ranks of the tp axis send rows, where each keeps its share of them.
    """

    max_num_batched_tokens: int = 1024
    two_batch_overlap: Switch = Switch.AUTO
    scatter_tokens: bool = False
    cuda_graphs: Switch = Switch.AUTO
    max_masked_tokens: int | Literal[Switch.AUTO] = Switch.AUTO
    overlap_shared_expert: bool = True
    dependent_launches: Switch = Switch.AUTO
    tp_exchange: TPExchangeKind = TPExchangeKind.AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSteps:
    """Steps of one token of each request, and its drafts, whose shapes can be fixed.

    Attributes:
        cuda_graphs: capture steps, one graph for each batch size, on a GPU.
        overlap_shared_expert: run the shared expert while tokens are routed and travel, on a GPU
            on a stream of its own.
        dependent_launches: bring a kernel onto a Hopper GPU while the one before it runs (PDL).
        dispatcher: how tokens are dispatched on GPUs.
        max_tokens_per_rank: most tokens that a GPU rank sends to experts in a step; sizes the
            buffers of all ranks.
        num_speculative_tokens: drafts of a request and step; its last token and they are the rows
            that it brings to a step. "auto": chosen before every step, up to 3, as far as
            `max_tokens_per_rank` has room for the rows.
        record_waits: record how long ranks wait for one another (`engine.boot.waits`).
    """

    cuda_graphs: Switch = Switch.AUTO
    overlap_shared_expert: bool = True
    dependent_launches: Switch = Switch.AUTO
    dispatcher: DispatcherKind = DispatcherKind.AUTO
    max_tokens_per_rank: int = 128
    num_speculative_tokens: int | Literal[Switch.AUTO] = 0
    record_waits: Switch = Switch.AUTO
    scatter_tokens: ClassVar[bool] = False
    """Each rank has requests of its own."""
    max_masked_tokens: ClassVar[int] = 0
    """Dispatchers of fixed shapes have their own layout, which is masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """One rank's engine.

    Attributes:
        steps: what its steps are like.
        kv: its KV pool.
        device: "cpu" or "cuda".
        num_threads: that compute, on a CPU.
        max_num_seqs: most requests of a step.
        num_redundant_experts: slots for second copies of experts, of all ranks together.
        rebalance_experts: whether experts may change their slots while steps run.
        rebalance_host_gib: of its host's memory that this rank may fill with copies of experts.
        prefix: what whoever asked puts before a field's name, such as "decode."; none for a caller
            that made these options by hand.

    Raises:
        ConfigError: a value that no engine can work with.
    """

    steps: ChunkSteps | TokenSteps
    kv: KVOptions = KVOptions()
    device: str = "cpu"
    num_threads: int = 1
    max_num_seqs: int = 16
    num_redundant_experts: int = 0
    rebalance_experts: Switch = Switch.OFF
    rebalance_host_gib: float = 0.0
    prefix: str = ""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(
                self.named("device"), self.device, "is no kind of device", '"cpu" or "cuda"'
            )
        self._check_least("num_threads", self.num_threads, 1)
        self._check_least("num_redundant_experts", self.num_redundant_experts, 0)
        self._check_least("max_num_seqs", self.max_num_seqs, 1)
        self._check_least(*self.token_bound, 1)
        match self.steps:
            case TokenSteps(max_tokens_per_rank=most, num_speculative_tokens=drafts):
                self._check_least("max_tokens_per_rank", most, 1)
                if drafts is not Switch.AUTO:
                    self._check_least("num_speculative_tokens", drafts, 0)
            case ChunkSteps(max_masked_tokens=int(most)):
                self._check_least("max_masked_tokens", most, 0)
        self._check_kv()

    @property
    def token_bound(self) -> tuple[str, int]:
        """What bounds the tokens of a step: the field (see `named`), and how many they are."""
        if isinstance(self.steps, ChunkSteps):
            return "max_num_batched_tokens", self.steps.max_num_batched_tokens
        return "max_num_seqs", self.max_num_seqs

    @property
    def max_rows(self) -> int:
        """Most tokens of a step, drafts included."""
        if isinstance(self.steps, ChunkSteps):
            return self.steps.max_num_batched_tokens
        return self.draft_choices.most_rows(batch_buckets(self.max_num_seqs))

    @property
    def draft_choices(self) -> DraftChoices:
        """How many drafts a step may have."""
        if isinstance(self.steps, ChunkSteps):
            return DraftChoices()
        asked = self.steps.num_speculative_tokens
        if asked is Switch.AUTO:
            return DraftChoices.up_to(AUTO_DRAFTS, max_rows=self.steps.max_tokens_per_rank)
        return DraftChoices.always(asked)

    @property
    def wants_graphs(self) -> bool:
        """Whether to try to capture steps."""
        return self.device == "cuda" and self.steps.cuda_graphs is not Switch.OFF

    def check_rows(self) -> None:
        """Refuse more rows of a step than ranks on GPUs make room for on the way to experts.

        Raises:
            ConfigError: a step may have more.
        """
        assert isinstance(self.steps, TokenSteps), self.steps
        most = self.steps.max_tokens_per_rank
        if self.max_rows <= most:
            return
        each = self.max_rows // self.max_num_seqs
        problem = f"{self.named('max_tokens_per_rank')} is {most}"
        if each > 1:
            problem += f", and with its drafts a request brings {each} tokens to a step"
        path, fitting = self.named("max_num_seqs"), max(most // each, 1)
        raise ConfigError(path, self.max_num_seqs, problem, f"{fitting} or less")

    def named(self, field: str) -> str:
        """Return how whoever asked for this engine calls a field of it, for errors."""
        return f"{self.prefix}{field}"

    def _check_kv(self) -> None:
        kv = self.kv
        self._check_least("block_size", kv.block_size, 1)
        if kv.num_blocks or self.device == "cpu":
            self._check_least("num_blocks", kv.num_blocks, 2)
        if not 0.0 < kv.gpu_memory_fraction <= 1.0:
            path, problem = self.named("gpu_memory_fraction"), "is no share of a memory"
            raise ConfigError(path, kv.gpu_memory_fraction, problem, "above 0, at most 1")

    def _check_least(self, field: str, value: int, least: int) -> None:
        if value < least:
            problem, fix = f"must be at least {least}", f"{least} or more"
            raise ConfigError(self.named(field), value, problem, fix)
