"""``[decode]``: the decode workers."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.checks import at_least, at_most, one_of
from runtime.config.sizes import (
    AUTO,
    Sizes,
    check_size,
    decide_sizes,
    decide_tokens_per_rank,
)
from runtime.config.worker_checks import check_rebalance, check_worker, max_ahead_of
from runtime.errors import ConfigError

_PLACES_PER_RUNNING = 4
MAX_DRAFTS = 3
DEFAULT_DRAFTS = "default"
"""What `num_speculative_tokens` is where nothing is said of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSection:
    """``[decode]``: the decode workers."""

    instances: int = 1
    dp: int = 1
    """Ranks of one instance: each attends to its own requests, experts are split over all."""
    ranks_per_host: int = 8
    """Most ranks of one instance on one host; the others follow on further hosts."""
    device: str = "cpu"
    num_threads: int = 1
    max_num_seqs: int | str = AUTO
    """Most requests of one step and rank; "auto": see `sizes`."""
    num_blocks: int | str = AUTO
    gpu_memory_fraction: float = 0.92
    block_size: int = 64
    max_num_reserved: int = 0
    """Most requests per rank, from Reserve to the last token; one more is rejected as overload. 0:
    four times ``max_num_seqs``. Until their KV is due they hold no memory."""
    preemption_host_blocks: int = 256
    """Host memory, in blocks, for the KV of preempted requests."""
    enable_prefix_caching: bool = True
    kv_dtype: str = "auto"
    overlap_steps: str = "auto"
    """Launch a step before the tokens of the one before it are read: "on", "off", or "auto" (on
    with "cuda")."""
    cuda_graphs: str = "auto"
    """Capture decode steps, one graph per batch size: "on", "off", or "auto" (with "cuda" and a
    model whose step can be captured)."""
    overlap_shared_expert: bool = True
    """Run the shared expert while tokens are routed and travel, on GPUs on a stream of its own."""
    dependent_launches: str = "auto"
    """Bring a kernel onto a Hopper GPU while the one before it runs: "on", "off", or "auto" (on
    with "cuda")."""
    num_redundant_experts: int = 0
    """Slots for second copies of experts, of all ranks together."""
    rebalance_experts: str = "off"
    """Move experts between ranks while requests are decoded, by what they get: "on" or "off"
    (docs/deep/experts.md)."""
    rebalance_interval_steps: int = 3000
    """Steps of a group from one plan to the next, by the load of as many steps."""
    rebalance_objective: str = "time"
    """What a plan has to better for experts to move: "time", modelled, of a step, in which rows
    may cost nothing, or "rows" of the slowest ranks, whatever they are worth."""
    rebalance_min_gain: float = 0.02
    """Share by which steps, or with "rows" the slowest ranks, must become faster by the plan for
    experts to move."""
    rebalance_host_gib: float = 0.0
    """Host memory that each rank may fill with copies of experts, so that those that move come from
    there and not from a rank that serves, as many whole layers as fit; 0: none."""
    expert_load: str = ""
    """A recording of what the experts of decode get (``tandem experts record``), by which they are
    placed at the start; the same file on all hosts. Empty: in order."""
    dispatcher: str = "auto"
    """How tokens travel to experts on GPUs: "nvlink" (stores into the memory of up to 8 GPUs of one
    host), "deep-ep", "gathered", or "auto" (by what runs, and by measurements)."""
    max_tokens_per_rank: int | str = AUTO
    """Most tokens that a GPU rank sends to experts in a step; sizes the buffers of all ranks.
    "auto": see `tokens_per_rank`."""
    num_speculative_tokens: int | str = DEFAULT_DRAFTS
    """Tokens that the checkpoint's layer for multi-token prediction drafts for each request and
    step, 0 to 3, which the next step verifies: the text is the same, the steps are fewer. Each
    counts as a token of ``max_tokens_per_rank``. "default": 1, and none where the checkpoint has no
    such layer, ``device_memory_gib`` or ``max_tokens_per_rank`` no room for it, or a GPU a given
    number of blocks; the log says why. "auto": before every step as many as the most tokens per
    second are expected of, none included, and as there is room for; none ever, where the checkpoint
    has no such layer, or ``device_memory_gib`` no room for it. 0: none, and the layer is not
    loaded. Either 0 or not in the configurations of all workers that pair."""
    record_waits: str = "auto"
    """Record how long the ranks of an instance wait for one another, and tell the router, which
    finds slow ranks and links: "on", "off", or "auto" (on). Of exchanges on GPUs "nvlink" is
    recorded, and "deep-ep" with "on"; else only slow hosts are found there."""
    device_memory_gib: float = 0.0
    """Memory of one GPU, to check before the start that a rank of either role fits; 0: not
    checked."""
    step_timeout_s: float = 30.0
    """A step, or the meeting of the ranks before it, that takes longer ends the worker; 0: no
    limit."""

    @property
    def sizes(self) -> Sizes:
        """What ``max_num_seqs`` and ``num_blocks`` come to."""
        return decide_sizes(
            "decode", self.device, max_num_seqs=self.max_num_seqs, num_blocks=self.num_blocks
        )

    @property
    def tokens_per_rank(self) -> int:
        """What ``max_tokens_per_rank`` comes to: "auto" has room for the largest step, where drafts
        are left open with one of each request.
        """
        if isinstance(self.max_tokens_per_rank, int):
            return self.max_tokens_per_rank
        asked = self.num_speculative_tokens
        num_drafts = asked if isinstance(asked, int) else 1
        return decide_tokens_per_rank(self.sizes.max_num_seqs, num_drafts)

    @property
    def num_ranks(self) -> int:
        """Ranks of one instance."""
        return self.dp

    @property
    def num_endpoints(self) -> int:
        """Ranks of one instance that take requests."""
        return self.dp

    @property
    def ranks_field(self) -> str:
        """The field that says how many ranks there are."""
        return "decode.dp"

    @property
    def num_places(self) -> int:
        """Most requests per rank: those that run, and some in line, so that it never runs dry."""
        return self.max_num_reserved or _PLACES_PER_RUNNING * self.sizes.max_num_seqs

    @property
    def max_ahead(self) -> int:
        """Steps whose results may be unread when another is launched."""
        return max_ahead_of(self)

    @property
    def wants_graphs(self) -> bool:
        """Whether to try to capture steps."""
        return self.device == "cuda" and self.cuda_graphs != "off"

    @property
    def has_drafts(self) -> bool:
        """Whether steps may verify drafts: both roles load the layer that makes them."""
        assert self.num_speculative_tokens != DEFAULT_DRAFTS, "nobody has decided on drafts"
        return self.num_speculative_tokens != 0

    @property
    def leaves_drafts_open(self) -> bool:
        """Whether checkpoint and room decide if there are any (`worker.auto_drafts`)."""
        return not isinstance(self.num_speculative_tokens, int)

    def __post_init__(self) -> None:
        check_worker("decode", self)
        one_of("decode.cuda_graphs", self.cuda_graphs, ("auto", "on", "off"))
        one_of("decode.dependent_launches", self.dependent_launches, ("auto", "on", "off"))
        one_of("decode.record_waits", self.record_waits, ("auto", "on", "off"))
        one_of("decode.dispatcher", self.dispatcher, ("auto", "nvlink", "deep-ep", "gathered"))
        at_least("decode.dp", self.dp, 1)
        at_least("decode.ranks_per_host", self.ranks_per_host, 1)
        at_least("decode.max_num_reserved", self.max_num_reserved, 0)
        at_least("decode.preemption_host_blocks", self.preemption_host_blocks, 0)
        at_least("decode.num_redundant_experts", self.num_redundant_experts, 0)
        check_rebalance("decode", self)
        check_size("decode.max_tokens_per_rank", self.max_tokens_per_rank, 1)
        self._check_drafts()
        at_least("decode.device_memory_gib", self.device_memory_gib, 0.0)

    def _check_drafts(self) -> None:
        path, asked = "decode.num_speculative_tokens", self.num_speculative_tokens
        if isinstance(asked, int):
            at_least(path, asked, 0)
            at_most(path, asked, MAX_DRAFTS)
        elif asked not in ("auto", DEFAULT_DRAFTS):
            problem = "is neither a number of drafts nor auto"
            raise ConfigError(path, asked, problem, f'"auto", or 0 to {MAX_DRAFTS}')
