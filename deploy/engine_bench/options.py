"""What is asked for: the options of both measurements, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.parallel.dims import ParallelDims
from engine.parallel.open_dispatcher import DispatcherKind
from runtime.errors import ConfigError


class Collectives(StrEnum):
    """Who moves data between the ranks of a prefill instance."""

    NCCL = "nccl"
    SYMMETRIC = "symmetric"


class Routing(StrEnum):
    """Who chooses experts: a table that is even, or the model's router with invented weights."""

    EVEN = "even"
    MODEL = "model"


class Axis(StrEnum):
    """Whose share a rank of a proxy holds: one of ranks that share heads, or with own tokens."""

    TP = "tp"
    DP = "dp"


class KVDtype(StrEnum):
    """How latents are stored."""

    BF16 = "bf16"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The model and how it is spread.

    Attributes:
        shape: a name of `engine.shapes`, or a checkpoint folder.
        tp: ranks that share heads; 1 with dp.
        dp: ranks with their own tokens; 1 with tp.
        ep: ranks that share experts: 1 or all of them.
        layers: of the model, 0 for all.
        shard_of: each rank holds what one of so many holds; 0 for what it holds here.
        shard_axis: along which axis those are ranks.
        device: "cuda" or "cpu".
        routing: who chooses experts.
        dispatcher: how tokens travel with dp; auto is DeepEP where it runs.
        repeats: measured batches or steps.
        warm_ups: batches or steps before them.
        profile: whether the stages of one batch are measured too.
        timeout_s: for the ranks to meet, and for each collective.
    """

    shape: str = "deepseek-v3"
    tp: int = 1
    dp: int = 1
    ep: int = 1
    layers: int = 0
    shard_of: int = 0
    shard_axis: Axis = Axis.TP
    device: str = "cuda"
    routing: Routing = Routing.EVEN
    dispatcher: DispatcherKind = DispatcherKind.AUTO
    repeats: int = 10
    warm_ups: int = 3
    profile: bool = True
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        self.dims(0)
        for name, least in (("layers", 0), ("shard_of", 0), ("repeats", 1), ("warm_ups", 0)):
            _check_least(name.replace("_", "-"), getattr(self, name), least)
        if self.ep == 1 and (self.dp > 1 or (self.shard_of and self.tp > 1)):
            problem = "ranks with their own tokens, or of a proxy, share the experts"
            raise ConfigError("ep", self.ep, problem, f"{self.world_size}")
        axis = Axis.TP if self.tp > 1 else Axis.DP
        if self.shard_of and self.world_size > 1 and self.shard_axis is not axis:
            problem = f"{self.world_size} ranks share the model along {axis}"
            raise ConfigError("shard-axis", str(self.shard_axis), problem, str(axis))

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tp * self.dp

    def dims(self, rank: int) -> ParallelDims:
        """The axes, as seen from a rank.

        Raises:
            ConfigError: they do not fit together.
        """
        return ParallelDims(tp=self.tp, dp=self.dp, ep=self.ep, rank=rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOptions:
    """A prefill measurement.

    Attributes:
        setup: model and ranks.
        prompt_len: tokens of each prompt.
        batch_tokens: tokens of a batch; per rank with dp, together with tp.
        overlap: two-batch overlap.
        lag: operations that the second micro-batch stays behind the first.
        scatter: whether tp ranks keep only their rows between layers.
        collectives: who moves data between tp ranks.
        ttft: whether one prompt alone is timed too.
    """

    setup: Setup
    prompt_len: int = 4096
    batch_tokens: int = 16384
    overlap: bool = True
    lag: int = 1
    scatter: bool = True
    collectives: Collectives = Collectives.NCCL
    ttft: bool = True

    def __post_init__(self) -> None:
        _check_least("prompt-len", self.prompt_len, 1)
        _check_least("lag", self.lag, 0)
        if self.setup.dispatcher is DispatcherKind.NVLINK:
            raise ConfigError(
                "dispatcher", "nvlink", "is made for the few tokens of decode", "auto"
            )
        if self.collectives is Collectives.SYMMETRIC and not self.is_scattered:
            problem = "symmetric memory serves ranks that keep their own rows"
            raise ConfigError("collectives", "symmetric", problem, "--tp N --scatter on, or nccl")
        if self.batch_tokens < 1 or self.batch_tokens % self.prompt_len:
            fitting = max(self.batch_tokens // self.prompt_len, 1) * self.prompt_len
            problem = f"is no multiple of --prompt-len {self.prompt_len}"
            raise ConfigError("batch-tokens", self.batch_tokens, problem, f"{fitting}")

    @property
    def is_scattered(self) -> bool:
        """Whether ranks keep only their rows between layers."""
        return self.scatter and self.setup.tp > 1

    @property
    def num_prompts(self) -> int:
        """Prompts of a batch on a rank."""
        return self.batch_tokens // self.prompt_len


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """A decode measurement.

    Attributes:
        setup: model and ranks.
        batch: requests of each rank.
        context: least and most tokens of context at the first measured step.
        kv_dtype: how latents are stored.
        graphs: whether steps are captured as CUDA graphs.
        overlap: whether a step is prepared while the one before runs.
        dependent_launches: see `Execution`.
        side_stream: whether the shared expert runs on a stream of its own, on GPUs.
        two_batch_overlap: whether a step runs as two micro-batches of half of the requests.
    """

    setup: Setup
    batch: int = 128
    context: tuple[int, int] = (1500, 1660)
    kv_dtype: KVDtype = KVDtype.BF16
    graphs: bool = True
    overlap: bool = True
    dependent_launches: bool = True
    side_stream: bool = True
    two_batch_overlap: bool = False

    def __post_init__(self) -> None:
        _check_least("batch", self.batch, 1)
        least, most = self.context
        if not 1 <= least <= most:
            raise ConfigError("context", f"{least}-{most}", "is no range", "for example 1500-1660")

    @property
    def mean_context(self) -> float:
        """Tokens that a request attends to, in the mean over requests and measured steps."""
        return (sum(self.context) + self.setup.repeats) / 2


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(name, value, f"is less than {least}", f"at least {least}")
