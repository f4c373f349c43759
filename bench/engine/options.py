"""What is asked for: the options of both measurements, checked before anything starts.

The key idea: what runs is what a section of the configuration says, with the server's defaults, and
`--set` changes a field as it does for `tandem up`. There is no other switch: what the server cannot
do is not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bench.engine.plays import Plays, check_plays
from engine.draft_choices import AUTO_DRAFTS
from engine.parallel.deep_ep_shape import ROW_TILE
from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from runtime.config.file import split_setting, with_settings
from runtime.errors import ConfigError

BLOCK_SIZE = 64
DEFAULT_BATCH = 128
"""Requests of a decode rank, and places at least, as in `deploy/configs/h200/ep16.toml`."""

_PLACED = (
    "expert_load", "rebalance_experts", "rebalance_interval_steps", "rebalance_objective",
    "rebalance_min_gain", "rebalance_host_gib",
)  # fmt: skip
"""Fields of both roles that decide where experts stand."""
EFFECTIVE: Mapping[str, frozenset[str]] = {
    "prefill": frozenset(
        (
            "expert_parallel", "num_threads", "max_num_seqs", "kv_dtype", "overlap_steps",
            "two_batch_overlap", "scatter_tokens", "cuda_graphs", "max_masked_tokens",
            "overlap_shared_expert", "dependent_launches", "tp_exchange",
            "num_redundant_experts", *_PLACED,
        )
    ),
    "decode": frozenset(
        (
            "num_threads", "max_num_seqs", "kv_dtype", "overlap_steps", "cuda_graphs",
            "overlap_shared_expert", "dependent_launches", "num_redundant_experts", "dispatcher",
            "max_tokens_per_rank", "record_waits", *_PLACED,
        )
    ),
}  # fmt: skip
"""Fields of a role's section that decide how a step runs."""
_FLAGS = {
    "tp": "--tp", "dp": "--dp", "device": "--device", "max_num_batched_tokens": "--batch-tokens",
    "num_speculative_tokens": "--drafts",
}  # fmt: skip
"""Fields that have an option of their own."""


class Routing(StrEnum):
    """Who chooses experts: a draw for each token, uniform or skewed, an even table, or the router
    as it is invented.

    See `bench.engine.routing`.
    """

    UNIFORM = "uniform"
    EVEN = "even"
    SKEWED = "skewed"
    MODEL = "model"


ROUTING_LABELS: Mapping[Routing, str] = {
    Routing.UNIFORM: "uniform routing",
    Routing.EVEN: "even routing, a bound: no padding, no skew",
    Routing.SKEWED: "routing by a synthetic skew",
    Routing.MODEL: "routing by the invented router",
}
"""Part of every label."""


class Axis(StrEnum):
    """Whose share a rank of a proxy holds: one of ranks that share heads, or with own tokens."""

    TP = "tp"
    DP = "dp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The model, how it is spread, and for how long it is measured.

    Attributes:
        shape: a name of `bench.shapes`, or a checkpoint folder.
        tp: ranks that share heads; 1 with dp.
        dp: ranks with their own tokens; 1 with tp.
        layers: of the model, 0 for all.
        shard_of: each rank holds what one of so many holds; 0 for what it holds here.
        shard_axis: along which axis those are ranks.
        device: "cuda" or "cpu".
        max_model_len: most tokens of prompt and output; 0 for all that the model knows.
        routing: who chooses experts.
        plays: ranks of the larger group, with skewed routing.
        temperature: of all requests; 0 is greedy.
        top_p: of all requests.
        seconds: of measured steps, at least.
        min_steps: measured, at least, however long they take.
        warm_up_s: of steps before them, at least.
        profile: whether the stages of one step are measured too.
        expert_load: whether gates count tokens by expert, as a worker's always do.
        seed: of all that is drawn.
        record_load: a file for what experts got, pass by pass, before any moved; empty: none.
        settings: fields of the role's section, "SECTION.FIELD=VALUE" each.
        timeout_s: for the ranks to meet, and for each collective.
    """

    shape: str = "deepseek-v3"
    tp: int = 1
    dp: int = 1
    layers: int = 0
    shard_of: int = 0
    shard_axis: Axis = Axis.TP
    device: str = "cuda"
    max_model_len: int = 0
    routing: Routing = Routing.UNIFORM
    plays: Plays = Plays.NOTHING
    temperature: float = 1.0
    top_p: float = 1.0
    seconds: float = 30.0
    min_steps: int = 0
    warm_up_s: float = 5.0
    profile: bool = True
    expert_load: bool = True
    record_load: str = ""
    seed: int = 0
    settings: tuple[str, ...] = ()
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ConfigError: by the option's name.
        """
        least = {"tp": 1, "dp": 1, "layers": 0, "shard_of": 0, "max_model_len": 0}
        for name, value in {**least, "temperature": 0, "warm_up_s": 0}.items():
            _check_least(_flag(name), getattr(self, name), value)
        if self.seconds <= 0:
            raise ConfigError("seconds", self.seconds, "nothing would be measured", "30")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError("top-p", self.top_p, "is no share", "above 0, at most 1")
        axis = Axis.TP if self.tp > 1 else Axis.DP
        if self.shard_of and self.world_size > 1 and self.shard_axis is not axis:
            problem = f"{self.world_size} ranks share the model along {axis}"
            raise ConfigError("shard-axis", str(self.shard_axis), problem, str(axis))
        check_plays(
            self.plays,
            is_skewed=self.routing is Routing.SKEWED,
            dp=self.dp,
            shard_of=self.shard_of,
            settings=self.settings,
        )

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tp * self.dp

    @property
    def has_own_tokens(self) -> bool:
        """Whether each rank, or each rank that one stands for, has its own tokens."""
        return self.dp > 1 or (self.shard_of > 0 and self.shard_axis is Axis.DP)

    @property
    def played_ranks(self) -> int:
        """Of which a rank that is alone plays one; 0 where ranks are themselves."""
        return self.shard_of if self.world_size == 1 and self.shard_axis is Axis.DP else 0

    def configure(self, role: str, defaults: Mapping[str, Any]) -> ClusterConfig:
        """The configuration with our sizes in a role's section, and what `--set` says over them.

        Raises:
            ConfigError: a field that is another role's, has an option, or is no part of a step.
        """
        for setting in self.settings:
            _check_setting(role, setting)
        section = {"prefill": PrefillSection, "decode": DecodeSection}[role]
        own = section(device=self.device, block_size=BLOCK_SIZE, **defaults)
        # The other role runs nothing here, but a cluster whose roles store KV unlike is none.
        alike = [
            setting.replace(role, {"prefill": "decode", "decode": "prefill"}[role], 1)
            for setting in self.settings
            if split_setting(setting)[0] == f"{role}.kv_dtype"
        ]
        base = ClusterConfig(model=ModelSection(path=self.shape), **{role: own})
        return with_settings(base, [*alike, *self.settings])


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOptions:
    """A prefill measurement.

    Attributes:
        setup: model and ranks.
        prompt_len: tokens of each prompt that run.
        cached_len: tokens before them whose KV is in the pool already, as of a cached prefix.
        batch_tokens: tokens of a batch; per rank with dp, together with tp.
        ttft: whether one prompt alone is timed too.
        drafts: whether decode has drafts, for which prefill runs the layer for them behind every
            step.
    """

    setup: Setup
    prompt_len: int = 4096
    cached_len: int = 0
    batch_tokens: int = 16384
    ttft: bool = True
    drafts: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ConfigError: by the option's name.
        """
        _check_least("prompt-len", self.prompt_len, 1)
        if self.cached_len < 0 or self.cached_len % BLOCK_SIZE:
            problem = f"is not a number of whole blocks of {BLOCK_SIZE} tokens"
            fitting = max(self.cached_len // BLOCK_SIZE, 0) * BLOCK_SIZE
            raise ConfigError("cached-len", self.cached_len, problem, f"{fitting}")
        if self.batch_tokens < 1 or self.batch_tokens % self.prompt_len:
            fitting = max(self.batch_tokens // self.prompt_len, 1) * self.prompt_len
            problem = f"is no multiple of --prompt-len {self.prompt_len}"
            raise ConfigError("batch-tokens", self.batch_tokens, problem, f"{fitting}")
        section = self.section
        if section.rebalance_experts == "on" and self.setup.dp == 1:
            problem = "ranks that vote before a step have their own tokens here"
            raise ConfigError("prefill.rebalance_experts", "on", problem, "--dp above 1")
        if self.setup.shard_of and self.setup.tp > 1 and not section.expert_parallel:
            problem = "the ranks of a proxy share the experts"
            raise ConfigError("prefill.expert_parallel", False, problem, "leave it out")
        if section.sizes.max_num_seqs < self.num_prompts:
            problem = f"a batch has {self.num_prompts} prompts"
            raise ConfigError(
                "prefill.max_num_seqs", section.sizes.max_num_seqs, problem, f"{self.num_prompts}"
            )

    @property
    def cluster(self) -> ClusterConfig:
        """The configuration of the worker whose steps run."""
        defaults = {
            "tp": self.setup.tp,
            "dp": self.setup.dp,
            "max_num_batched_tokens": self.batch_tokens,
            "max_num_seqs": max(PrefillSection().sizes.max_num_seqs, self.num_prompts),
        }
        return self.setup.configure("prefill", defaults)

    @property
    def section(self) -> PrefillSection:
        """Its section."""
        return self.cluster.prefill

    @property
    def with_mtp(self) -> bool:
        """Whether the model has its layer for drafts."""
        return self.drafts

    @property
    def num_prompts(self) -> int:
        """Prompts of a batch on a rank."""
        return self.batch_tokens // self.prompt_len


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """A decode measurement.

    Attributes:
        setup: model and ranks.
        requests: of each rank, one number a rank.
        context_lens: least and most tokens that a request attends to at its first step.
        output_len: steps of a request; then another one as long takes its place.
        grammar: whether every request is bound by a JSON schema of its own.
        drafts: that a step verifies for each request; "auto" for as many as pay, before each step.
        accept: of drafts, the share that is right, each behind a right one; None for what the
            invented layer guesses, which is nothing.
        drawn_inputs: whether a request goes on with a drawn token, whatever it said: then a token
            that differs between two runs changes nothing about those that follow.
        step_log: a file for what every step said and took; empty: none.
        same_text_as: such a file of an earlier run, whose tokens are compared; empty: none.
    """

    setup: Setup
    requests: tuple[int, ...] = (DEFAULT_BATCH,)
    context_lens: tuple[int, int] = (1500, 1660)
    output_len: int = 128
    grammar: bool = False
    drafts: int | str = 0
    accept: float | None = None
    drawn_inputs: bool = False
    step_log: str = ""
    same_text_as: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ConfigError: by the option's name.
        """
        if self.setup.tp > 1:
            raise ConfigError("tp", self.setup.tp, "decode ranks have their own tokens", "--dp")
        shown, name = ",".join(map(str, self.requests)), "requests-per-rank"
        if len(self.requests) != self.setup.dp:
            problem = f"there are {self.setup.dp} ranks"
            raise ConfigError(name, shown, problem, ",".join(["128"] * self.setup.dp))
        if min(self.requests) < 0 or not self.requests[0]:
            problem = "rank 0, whose steps are timed, needs requests, and no rank has less than 0"
            raise ConfigError(name, shown, problem, "the largest number first")
        least, most = self.context_lens
        if not 2 <= least <= most:
            problem = "is no range of a token known before, and the one that runs"
            raise ConfigError("context-lens", f"{least}-{most}", problem, "for example 1500-1660")
        _check_least("output-len", self.output_len, 1)
        if self.accept is not None and not (self.drafts and 0 <= self.accept <= 1):
            problem = "is a share of drafts" if self.drafts else "there are no drafts"
            raise ConfigError("accept", self.accept, problem, "0 to 1, with --drafts")
        self._check_tokens()
        section = self.section
        if section.sizes.max_num_seqs < max(self.requests):
            problem = f"a rank has {max(self.requests)} requests"
            raise ConfigError(
                "decode.max_num_seqs", section.sizes.max_num_seqs, problem, f"{max(self.requests)}"
            )

    def _check_tokens(self) -> None:
        if self.drafts and (self.drawn_inputs or self.step_log or self.same_text_as):
            problem = "the tokens of a step are compared, and drafts make it more than one"
            raise ConfigError("drafts", self.drafts, problem, "0")
        if self.drawn_inputs and self.section.max_ahead:
            problem = "with --drawn-inputs a step waits for the token that it is given"
            raise ConfigError(
                "decode.overlap_steps", "on", problem, "--set decode.overlap_steps=off"
            )

    @property
    def cluster(self) -> ClusterConfig:
        """The configuration of the worker whose steps run."""
        most = max(DEFAULT_BATCH, *self.requests)
        step = ROW_TILE // math.gcd(self.setup.dp, ROW_TILE)
        most_rows = most * self.rows_each
        defaults = {
            "dp": self.setup.dp,
            "max_num_seqs": most,
            "max_tokens_per_rank": max(
                DecodeSection().tokens_per_rank, -(-most_rows // step) * step
            ),
            "num_speculative_tokens": self.drafts,
        }
        return self.setup.configure("decode", defaults)

    @property
    def section(self) -> DecodeSection:
        """Its section."""
        return self.cluster.decode

    @property
    def with_mtp(self) -> bool:
        """Whether the model has its layer for drafts."""
        return self.section.has_drafts

    @property
    def rows_each(self) -> int:
        """Most rows of a request in a step: its last token and the drafts behind it."""
        return 1 + (self.drafts if isinstance(self.drafts, int) else AUTO_DRAFTS)

    @property
    def is_equal(self) -> bool:
        """Whether all ranks have as many requests."""
        return len(set(self.requests)) == 1


def _check_setting(role: str, setting: str) -> None:
    path, _ = split_setting(setting)
    section, _, name = path.partition(".")
    if section != role:
        problem = f"no {role} rank reads it"
        raise ConfigError("--set", setting, problem, f"a field of {role}")
    if name in _FLAGS:
        raise ConfigError("--set", setting, "has an option of its own", _FLAGS[name])
    if name not in EFFECTIVE[role]:
        fix = "one of " + ", ".join(sorted(EFFECTIVE[role]))
        raise ConfigError("--set", setting, "changes nothing about a step", fix)


def _check_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(name, value, f"is less than {least}", f"at least {least}")


def _flag(name: str) -> str:
    return name.removesuffix("_s").replace("_", "-")
