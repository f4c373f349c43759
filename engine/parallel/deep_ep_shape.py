"""The sizes that DeepEP is opened with, in both modes: what fits, and how many bytes it takes.

Pure arithmetic, without the library, so that a cluster can be checked on any machine. The key idea:
in low-latency mode everything follows from one constant, the most tokens that a rank brings to a
step; it is given once, and rows, buffers and queue depths are derived from it here.

The byte counts restate the library's size hints (a GPU test compares them).

Letters: R ranks, E physical experts, T most tokens of a rank, D hidden size.
"""

import math
from dataclasses import dataclass
from typing import Final

from runtime.errors import ConfigError

GROUP: Final = 128
"""Neighbours that share a scale."""

LOW_LATENCY_HIDDEN_SIZES: Final = (2048, 2560, 4096, 5120, 6144, 7168, 8192)
"""Widths that the library's low-latency kernels are compiled for."""

MAX_LOW_LATENCY_TOKENS: Final = 1024
MAX_LOW_LATENCY_TOP_K: Final = 11
MIN_QUEUE_DEPTH: Final = 1024
NVLINK_RANKS: Final = (2, 4, 8)
"""Ranks of one host that the normal kernels take."""

ROW_TILE: Final = 128
"""Rows per expert come in multiples of this: a tile of the masked product must not reach into the
next expert's rows (and scales must start at multiples of 16 bytes)."""

_ALIGNMENT = 128
_RECEIVE_SLOTS = 256
"""Tokens that a channel of a normal buffer holds per peer, as the library recommends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowLatencyShape:
    """One low-latency buffer; equal on all ranks, in every dispatch and every CUDA graph.

    Attributes:
        num_ranks: R.
        num_experts: E, physical, of all ranks together.
        max_tokens_per_rank: T.
        hidden_size: D.

    Raises:
        ConfigError: sizes that do not fit together.
    """

    num_ranks: int
    num_experts: int
    max_tokens_per_rank: int
    hidden_size: int

    def __post_init__(self) -> None:
        most, tokens, ranks = MAX_LOW_LATENCY_TOKENS, self.max_tokens_per_rank, self.num_ranks
        if not 1 <= tokens <= most:
            raise ConfigError("max_tokens_per_rank", tokens, f"not in 1..{most}", f"{most} or less")
        if ranks < 1 or self.num_experts % ranks:
            raise ConfigError(
                "num_physical_experts",
                self.num_experts,
                f"not a multiple of {ranks} ranks",
                f"{_round_up(self.num_experts, max(1, ranks))}, by redundant experts",
            )
        if (ranks * tokens) % ROW_TILE:
            step = ROW_TILE // math.gcd(ranks, ROW_TILE)
            raise ConfigError(
                "max_tokens_per_rank",
                tokens,
                f"{ranks} ranks x {tokens} rows per expert is not a multiple of {ROW_TILE}",
                f"{_round_up(tokens, step)}",
            )
        if self.hidden_size % GROUP:
            raise ConfigError(
                "hidden_size", self.hidden_size, "not a multiple of 128", "another model"
            )

    def check_library(self, top_k: int) -> None:
        """Refuse what the library's kernels were not compiled for.

        Raises:
            ConfigError: naming the field, and what fits.
        """
        if self.num_ranks > 8 and self.num_ranks % 8:
            lower = self.num_ranks // 8 * 8
            raise ConfigError(
                "ep", self.num_ranks, "more than 8 ranks come in whole hosts of 8", f"{lower}"
            )
        if self.hidden_size not in LOW_LATENCY_HIDDEN_SIZES:
            raise ConfigError(
                "hidden_size",
                self.hidden_size,
                f"low-latency dispatch knows {', '.join(map(str, LOW_LATENCY_HIDDEN_SIZES))}",
                "gathered dispatch instead",
            )
        if top_k > MAX_LOW_LATENCY_TOP_K:
            raise ConfigError(
                "num_experts_per_tok",
                top_k,
                f"low-latency dispatch takes at most {MAX_LOW_LATENCY_TOP_K}",
                "gathered dispatch instead",
            )

    @property
    def num_local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.num_ranks

    @property
    def rows_per_expert(self) -> int:
        """Rows that every local expert has room for: all tokens of all ranks may choose it."""
        return self.num_ranks * self.max_tokens_per_rank

    @property
    def queue_depth(self) -> int:
        """Entries of a network queue, a power of two: two per token in flight, and two more."""
        depth = MIN_QUEUE_DEPTH
        while depth < 2 * (self.max_tokens_per_rank + 1):
            depth *= 2
        return depth

    @property
    def buffer_bytes(self) -> int:
        """Registered memory of one rank: send and receive, twice, for all experts of all ranks."""
        scales = self.hidden_size // GROUP
        dispatch_message = 16 + max(2 * self.hidden_size, self.hidden_size + 4 * scales)
        combine_message = 4 * scales + 2 * self.hidden_size
        pairs = self.num_experts * self.max_tokens_per_rank
        send = max(self.max_tokens_per_rank * dispatch_message, pairs * combine_message)
        receive = pairs * max(dispatch_message, combine_message)
        signals = _round_up(4 * self.num_experts, _ALIGNMENT)
        total = 2 * (send + receive + signals)
        return (total + _ALIGNMENT) // _ALIGNMENT * _ALIGNMENT

    @property
    def received_bytes(self) -> int:
        """Device memory of one dispatch's result in FP8, outside of the buffer."""
        rows = self.num_local_experts * self.rows_per_expert
        return rows * (self.hidden_size + 4 * (self.hidden_size // GROUP) + 4)

    def expected_rows(self, num_tokens: int, top_k: int) -> int:
        """Return the mean rows of an expert if every rank brings `num_tokens`, at least 1."""
        return max(1, -(-self.num_ranks * num_tokens * top_k // self.num_experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalShape:
    """One normal buffer, inside one NVLink host.

    Attributes:
        num_ranks: R.
        num_experts: E, physical, of all ranks together.
        hidden_size: D.
        num_sms: SMs that a transfer takes; even. Half of them are channels.

    Raises:
        ConfigError: sizes that do not fit together.
    """

    num_ranks: int
    num_experts: int
    hidden_size: int
    num_sms: int = 20

    def __post_init__(self) -> None:
        if self.num_sms < 2 or self.num_sms % 2:
            raise ConfigError("num_sms", self.num_sms, "not a positive even number", "20")
        if self.num_ranks < 1 or self.num_experts % self.num_ranks:
            raise ConfigError(
                "num_physical_experts",
                self.num_experts,
                f"not a multiple of {self.num_ranks} ranks",
                "as many redundant experts as are missing",
            )
        if self.hidden_size % GROUP:
            raise ConfigError(
                "hidden_size", self.hidden_size, "not a multiple of 128", "another model"
            )

    def check_library(self) -> None:
        """Refuse what the library's kernels were not compiled for.

        Raises:
            ConfigError: naming the ranks that fit.
        """
        if self.num_ranks not in NVLINK_RANKS:
            raise ConfigError(
                "ep", self.num_ranks, "normal dispatch runs inside one host", "2, 4 or 8 ranks"
            )

    @property
    def num_local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.num_ranks

    @property
    def buffer_bytes(self) -> int:
        """NVLink memory of one rank: a ring of tokens per channel and peer, and its counters."""
        slots = self.num_sms // 2 * self.num_ranks
        # A slot has room for the row in bfloat16, its source, and 128 ids, weights and scales.
        token = 2 * self.hidden_size + 8 + 128 * (8 + 4 + 4)
        return _round_up(slots * (5 * 4 + _RECEIVE_SLOTS * token), _ALIGNMENT)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
