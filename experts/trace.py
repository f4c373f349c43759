"""Which experts the gate chose, pass by pass: what is recorded, planned from and replayed.

Counts are of *logical* experts and summed over all ranks, so that a trace says nothing of where
experts stood when it was made: it can be replayed on any number of ranks. Rows of no request
(padding of fixed shapes, the one token of an idle rank) are in no count: they go to no expert.

One file, an ordinary `.npz` that numpy reads without pickle, compressed. Pure, on the host.

Letters in shapes: N rows of the trace (a pass, or a window of them), L MoE layers, E logical
experts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from runtime.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT_VERSION: Final = 1
ROLES: Final = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertTrace:
    """What a role's gate chose over a stretch of passes. Its arrays become read-only.

    Attributes:
        counts_NLE: int64, tokens that the gate of a MoE layer sent to each logical expert, summed
            over all ranks. Layers in the model's order, dense layers left out, layers for
            multi-token prediction last.
        tokens_N: int64, tokens of the row that had a request, summed over all ranks. Each of them
            is `top_k` choices in every layer.
        role: "prefill" or "decode": their distributions differ, and a plan is for one of them.
        model_name: for reports.
        top_k: experts that a token chooses (`num_experts_per_tok`).
        num_groups: groups of neighbouring experts (`n_group`); 1 without.
        topk_group: groups that a token's experts may lie in (`topk_group`); 1 without.
        num_ranks: expert-parallel ranks of the instance that was recorded.
        num_hosts: that they stood on.
        passes_per_row: passes summed in a row; balancedness and its noise floor are of a pass, so
            more than one makes both look better than they were.
        hidden_size: numbers of a token's row.
        moe_intermediate_size: inner width of an expert.
        expert_bytes: of one expert's weights and scales in one layer, as a rank keeps them.
        num_draft_layers: how many of the last layers draft tokens; they run other rows than
            `tokens_N` says.
        coactivation_LEE: int64, tokens that chose both experts; symmetric, on the diagonal the
            expert's own tokens. None where pairs were not recorded.
    """

    counts_NLE: NDArray[np.int64]
    tokens_N: NDArray[np.int64]
    role: str
    model_name: str
    top_k: int
    num_groups: int = 1
    topk_group: int = 1
    num_ranks: int
    num_hosts: int = 1
    passes_per_row: int = 1
    hidden_size: int
    moe_intermediate_size: int
    expert_bytes: int
    num_draft_layers: int = 0
    coactivation_LEE: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_arrays(self)
        for array in (self.counts_NLE, self.tokens_N, self.coactivation_LEE):
            if array is not None:
                array.flags.writeable = False

    @property
    def num_rows(self) -> int:
        """N."""
        return int(self.counts_NLE.shape[0])

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.counts_NLE.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.counts_NLE.shape[2])

    @property
    def tokens_per_pass(self) -> float:
        """The mean number of tokens of one pass over all ranks; 0.0 of an empty trace."""
        passes = self.num_rows * self.passes_per_row
        return float(self.tokens_N.sum()) / passes if passes else 0.0

    def rows(self, start: int, stop: int) -> ExpertTrace:
        """The rows from `start` up to `stop`; co-activation, which has no rows, stays whole."""
        return dataclasses.replace(
            self,
            counts_NLE=self.counts_NLE[start:stop],
            tokens_N=self.tokens_N[start:stop],
        )

    def save(self, path: Path) -> None:
        """Write the trace; a reader sees the whole file or the one before."""
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with unfinished.open("wb") as file:
                self.write(file)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def write(self, file: IO[bytes]) -> None:
        """Write the trace to an open file."""
        scalars = {name: getattr(self, name) for name in _SCALARS}
        arrays: dict[str, Any] = {
            "version": np.int64(FORMAT_VERSION),
            "metadata": np.array(json.dumps(scalars)),
            "counts": self.counts_NLE,
            "tokens": self.tokens_N,
        }
        if self.coactivation_LEE is not None:
            arrays["coactivation"] = self.coactivation_LEE
        np.savez_compressed(file, **arrays)


_SCALARS: Final = tuple(
    field.name
    for field in dataclasses.fields(ExpertTrace)
    if field.name not in ("counts_NLE", "tokens_N", "coactivation_LEE")
)


def load_trace(path: Path) -> ExpertTrace:
    """Read what `ExpertTrace.save` wrote.

    Raises:
        ConfigError: no such file, not such a file, or numbers in it that cannot be.
    """
    again = "record it again: tandem experts record"
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays: Mapping[str, NDArray[Any]] = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        problem = f"cannot be read as a trace of experts ({error})"
        raise ConfigError("TRACE", str(path), problem, again) from error
    missing = {"version", "metadata", "counts", "tokens"} - arrays.keys()
    if missing:
        problem = f"holds no {', '.join(sorted(missing))}, so it is no trace of experts"
        raise ConfigError("TRACE", str(path), problem, again)
    version = int(arrays["version"])
    if version != FORMAT_VERSION:
        problem = f"is of format {version}, this build reads {FORMAT_VERSION}"
        raise ConfigError("TRACE", str(path), problem, again)
    try:
        metadata = json.loads(str(arrays["metadata"]))
        return ExpertTrace(
            counts_NLE=arrays["counts"],
            tokens_N=arrays["tokens"],
            coactivation_LEE=arrays.get("coactivation"),
            **metadata,
        )
    except (TypeError, json.JSONDecodeError) as error:
        problem = f"its metadata is wrong ({error})"
        raise ConfigError("TRACE", str(path), problem, again) from error


def _check_numbers(trace: ExpertTrace) -> None:
    if trace.role not in ROLES:
        raise ConfigError("trace.role", trace.role, "no role with experts", " or ".join(ROLES))
    least = {name: 1 for name in _SCALARS if name not in ("role", "model_name")}
    least["num_draft_layers"] = 0
    for name, smallest in least.items():
        value = getattr(trace, name)
        if not isinstance(value, int) or value < smallest:
            problem = "not a whole number that can be"
            raise ConfigError(f"trace.{name}", value, problem, f"{smallest} or more")
    if trace.num_ranks % trace.num_hosts:
        problem = f"not a multiple of {trace.num_hosts} hosts"
        fix = f"{-(-trace.num_ranks // trace.num_hosts) * trace.num_hosts}"
        raise ConfigError("trace.num_ranks", trace.num_ranks, problem, fix)
    if trace.topk_group > trace.num_groups:
        problem = f"more groups than the {trace.num_groups} that there are"
        raise ConfigError("trace.topk_group", trace.topk_group, problem, f"{trace.num_groups}")


def _check_arrays(trace: ExpertTrace) -> None:
    counts, tokens = trace.counts_NLE, trace.tokens_N
    for name, array, ndim, letters in (
        ("counts_NLE", counts, 3, "passes, layers, experts"),
        ("tokens_N", tokens, 1, "passes"),
    ):
        if array.ndim != ndim or array.dtype != np.int64:
            problem = f"shape {array.shape} of {array.dtype}"
            raise ConfigError(f"trace.{name}", problem, "wrong form", f"[{letters}] int64")
        if array.size and int(array.min()) < 0:
            raise ConfigError(f"trace.{name}", int(array.min()), "a count below 0", "0 or more")
    if len(tokens) != len(counts):
        problem = f"there are {len(counts)} rows of counts"
        raise ConfigError("trace.tokens_N", f"{len(tokens)} rows", problem, f"{len(counts)} rows")
    experts = trace.num_experts
    if experts < trace.top_k or experts % trace.num_groups:
        problem = f"top_k is {trace.top_k}, and experts come in {trace.num_groups} groups"
        fix = "a multiple of the groups, and no fewer than top_k"
        raise ConfigError("trace.num_experts", experts, problem, fix)
    _check_sums(trace)
    pairs = trace.coactivation_LEE
    expected = (trace.num_layers, experts, experts)
    if pairs is not None and (pairs.shape != expected or pairs.dtype != np.int64):
        problem = f"shape {pairs.shape} of {pairs.dtype}"
        fix = f"{expected} int64, or none"
        raise ConfigError("trace.coactivation_LEE", problem, "wrong form", fix)


def _check_sums(trace: ExpertTrace) -> None:
    """More choices than the tokens made: padding was counted, or a row twice."""
    layers = max(trace.num_layers - trace.num_draft_layers, 0)
    sums_NL = trace.counts_NLE[:, :layers].sum(axis=2)
    excess = np.argwhere(sums_NL > trace.tokens_N[:, None] * trace.top_k)
    if len(excess):
        row, layer = (int(i) for i in excess[0])
        tokens = int(trace.tokens_N[row])
        raise ConfigError(
            "trace.counts_NLE",
            int(sums_NL[row, layer]),
            f"layer {layer} of row {row} has more choices than {tokens} tokens x {trace.top_k}",
            "count no padding, and sum tokens over the same ranks and passes",
        )
