"""``[prefill]``: the prefill workers."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.checks import at_least, one_of
from runtime.config.sizes import AUTO, Sizes, check_size, decide_sizes
from runtime.config.worker_checks import check_rebalance, check_worker, max_ahead_of
from runtime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSection:
    """``[prefill]``: the prefill workers."""

    instances: int = 1
    tp: int = 1
    """Ranks of one instance: attention heads and experts are split over them."""
    dp: int = 1
    """Ranks of one instance, instead of ``tp``: each computes its own prompts, experts are split
    over all."""
    expert_parallel: bool = True
    """Whole experts per rank; false: every expert is sliced over the ranks (plain TP)."""
    device: str = "cpu"
    num_threads: int = 1
    """Compute threads of one rank on a CPU."""
    num_redundant_experts: int = 0
    """Slots for second copies of experts, of all ranks together."""
    rebalance_experts: str = "off"
    """Move experts between ranks while prompts are computed, by what they get: "on" or "off"
    (docs/deep/experts.md)."""
    rebalance_interval_steps: int = 200
    """Steps of a group from one plan to the next, by the load of as many steps."""
    rebalance_objective: str = "time"
    """What a plan has to better for experts to move: "time", modelled, of a step, or "rows" of the
    slowest ranks."""
    rebalance_min_gain: float = 0.02
    """Share by which steps, or with "rows" the slowest ranks, must become faster by the plan for
    experts to move."""
    rebalance_host_gib: float = 0.0
    """Host memory that each rank may fill with copies of experts, so that those that move come from
    there and not from a rank that serves, as many whole layers as fit; 0: none."""
    expert_load: str = ""
    """A recording of what the experts of prefill get (``tandem experts record``), by which they are
    placed at the start; the same file on all hosts. Empty: in order."""
    max_num_seqs: int | str = AUTO
    """Most requests of one step; "auto": see `sizes`."""
    max_num_batched_tokens: int | str = AUTO
    """Most prompt tokens of one step; longer prompts are computed in chunks."""
    num_blocks: int | str = AUTO
    """Blocks of the KV pool, block 0 (padding) included; with "cuda" "auto", or 0, is as many as
    fit."""
    gpu_memory_fraction: float = 0.92
    """Of a GPU's memory, what a worker may take with everything: decides how many blocks fit."""
    block_size: int = 64
    """Tokens of one block; the same in both roles."""
    enable_prefix_caching: bool = True
    kv_dtype: str = "auto"
    """One of "auto" (the model's dtype), "float32", "bfloat16", "fp8" (e4m3, no scales); the same
    in both roles."""
    overlap_steps: str = "auto"
    """Launch a step while the one before it runs: "on", "off", or "auto" (on with "cuda")."""
    two_batch_overlap: str = "auto"
    """Run a large step as two micro-batches, one computing while the other communicates: "on",
    "off", or "auto" (where measurements say that it pays: see ``engine.boot.open_execution``)."""
    scatter_tokens: str = "auto"
    """Each rank keeps only its share of the hidden states between layers: "on", "off", or "auto"
    (with several ranks and ``expert_parallel``)."""
    cuda_graphs: str = "auto"
    """Capture steps of up to 256 tokens behind a cached prefix, one graph per number of tokens:
    "on", "off", or "auto" (with "cuda" and a model whose step can be captured)."""
    max_masked_tokens: int | str = "auto"
    """Most tokens of a step whose experts take rows in the masked layout, as in decode; 0: none.
    "auto": where measurements say that it pays, see ``engine.boot.open_execution``."""
    overlap_shared_expert: bool = True
    """Run the shared expert while tokens travel to the routed ones; in steps of at most 256 tokens
    on a stream of its own, beside routing too."""
    dependent_launches: str = "auto"
    """In captured steps of suffixes, bring a kernel onto the GPU while the one before it runs:
    "on", "off", or "auto" (on: see ``engine.boot.open_execution``)."""
    tp_exchange: str = "auto"
    """How ranks that each keep a share of the hidden states send one another rows and sums:
    "nvlink" (stores into one another's memory, on one host), "collectives" (NCCL, or gloo on a
    CPU), or "auto" (the first of them that runs here)."""
    step_timeout_s: float = 30.0
    """A step of up to 4096 tokens that takes longer ends the worker, larger ones have as much more;
    0: no limit."""

    def step_limit_s(self, num_tokens: int) -> float:
        """The time that a step of so many tokens may take; 0: no limit."""
        return self.step_timeout_s * max(1.0, num_tokens / 4096)

    @property
    def sizes(self) -> Sizes:
        """What ``max_num_seqs``, ``max_num_batched_tokens`` and ``num_blocks`` come to."""
        return decide_sizes(
            "prefill",
            self.device,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_blocks=self.num_blocks,
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of one instance."""
        return self.tp * self.dp

    @property
    def ranks_per_host(self) -> int:
        """Ranks of one instance on one host: all of them."""
        return self.num_ranks

    @property
    def num_endpoints(self) -> int:
        """Ranks of one instance that take requests: with ``tp`` the first one does for all."""
        return self.dp

    @property
    def ranks_field(self) -> str:
        """The field that says how many ranks there are."""
        return "prefill.dp" if self.dp > 1 else "prefill.tp"

    @property
    def max_ahead(self) -> int:
        """Steps whose results may be unread when another is launched."""
        return max_ahead_of(self)

    @property
    def is_scattered(self) -> bool:
        """Whether each rank keeps its share of the hidden states."""
        return self.scatter_tokens != "off" and self.tp > 1 and self.expert_parallel

    def __post_init__(self) -> None:
        check_worker("prefill", self)
        at_least("prefill.tp", self.tp, 1)
        at_least("prefill.dp", self.dp, 1)
        at_least("prefill.num_redundant_experts", self.num_redundant_experts, 0)
        if self.tp > 1 and self.dp > 1:
            fix = "1, or prefill.tp = 1: one of them says how many ranks there are"
            raise ConfigError("prefill.dp", self.dp, f"prefill.tp is {self.tp}", fix)
        if self.dp > 1 and not self.expert_parallel:
            problem = f"the {self.dp} ranks of prefill.dp would share nothing"
            fix = "true, or prefill.dp = 1 and more prefill.instances"
            raise ConfigError("prefill.expert_parallel", False, problem, fix)
        check_size("prefill.max_num_batched_tokens", self.max_num_batched_tokens, 16)
        check_rebalance("prefill", self)
        for name in ("cuda_graphs", "dependent_launches"):
            one_of(f"prefill.{name}", getattr(self, name), ("auto", "on", "off"))
        self._check_masked()
        self._check_exchange()
        self._check_experts()

    def _check_masked(self) -> None:
        path, asked = "prefill.max_masked_tokens", self.max_masked_tokens
        if isinstance(asked, int):
            at_least(path, asked, 0)
        elif asked != "auto":
            problem = "is neither a number of tokens nor auto"
            raise ConfigError(path, asked, problem, '"auto", 0 for none, or such as 64')
        if asked not in ("auto", 0) and self.dp > 1:
            problem = "rows come to experts one by one with prefill.dp"
            raise ConfigError(path, asked, problem, '"auto" or 0')

    def _check_experts(self) -> None:
        if self.expert_parallel:
            return
        problem, fix = "every rank has a slice of all experts", "prefill.expert_parallel = true"
        if self.num_redundant_experts:
            path, count = "prefill.num_redundant_experts", self.num_redundant_experts
            raise ConfigError(path, count, problem, f"0, or {fix}")
        if self.rebalance_experts == "on":
            raise ConfigError("prefill.rebalance_experts", "on", problem, f'"off", or {fix}')
        if self.expert_load:
            raise ConfigError("prefill.expert_load", self.expert_load, problem, f'"", or {fix}')

    def _check_exchange(self) -> None:
        """Refuse what the ranks cannot do, rather than leave it out in silence."""
        for name in ("two_batch_overlap", "scatter_tokens"):
            one_of(f"prefill.{name}", getattr(self, name), ("auto", "on", "off"))
        path, problem = "prefill.two_batch_overlap", "one rank has nobody to communicate with"
        if self.two_batch_overlap == "on" and self.num_ranks == 1:
            raise ConfigError(path, "on", problem, '"auto", or prefill.tp or prefill.dp above 1')
        path, problem = "prefill.scatter_tokens", "needs several ranks with whole experts each"
        if self.scatter_tokens == "on" and not self.is_scattered:
            fix = '"auto", or prefill.tp above 1 with prefill.expert_parallel'
            raise ConfigError(path, "on", problem, fix)
        path, asked = "prefill.tp_exchange", self.tp_exchange
        one_of(path, asked, ("auto", "nvlink", "collectives"))
        if asked == "nvlink" and not self.is_scattered:
            problem = "no rank keeps a share of the hidden states"
            fix = '"auto", or prefill.tp above 1 with prefill.expert_parallel'
            raise ConfigError(path, asked, problem, fix)
        if asked == "nvlink" and self.two_batch_overlap == "on":
            problem = "two micro-batches would have two transfers in flight"
            raise ConfigError(path, asked, problem, '"auto", or prefill.two_batch_overlap = "off"')
