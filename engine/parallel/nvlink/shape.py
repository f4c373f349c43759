"""The sizes of an NVLink exchange: what fits, and where everything lies in a rank's buffer.

Pure arithmetic. A rank's buffer is a line of counters for each parity of transfers, with one int32
for each sending rank, and a half for the transfers of each parity. A half holds what a dispatch
brings or what a combine brings, one over the other:

- dispatch: *tallies* [R, L + 1] int32, by sending rank: its tokens for each local expert, and how
  many tokens it has; *routes* [R, T, 2, K], for each token K places and K weights; *rows*
  [R, T, bytes], packed as `Fp8Rows.packed` has them;
- combine: *sums* [R, T, D] bfloat16, by the rank that has computed them.

A place is (local expert) * T + (the sender's tokens before this one that chose it too), -1 where
the expert is on another rank.
"""

from dataclasses import dataclass
from typing import Final

from engine.formats.fp8_rows import GROUP, packed_row_bytes
from engine.kernels.masked_rows import guess_rows, max_masked_rows
from runtime.errors import ConfigError

MAX_RANKS: Final = 8
"""Of one host."""

MAX_TOKENS: Final = 512
MAX_TOP_K: Final = 16
MAX_EXPERTS: Final = 1024
"""What the kernels' tiles are made for."""

LINE: Final = 128
"""Bytes of a parity's counters, one access for all of them, and the alignment of every part."""

UNITS: Final = 128
"""What a rank adds to its counter at a peer in a transfer, and programs of a dispatch's send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkShape:
    """One exchange; equal on all ranks.

    Attributes:
        num_ranks: R.
        num_experts: R * L, physical.
        max_tokens_per_rank: T.
        hidden_size: D.
        top_k: K.

    Raises:
        ConfigError: sizes that do not fit together, or that the kernels do not take.
    """

    num_ranks: int
    num_experts: int
    max_tokens_per_rank: int
    hidden_size: int
    top_k: int

    def __post_init__(self) -> None:
        for field, value, least, most in (
            ("ep", self.num_ranks, 2, MAX_RANKS),
            ("max_tokens_per_rank", self.max_tokens_per_rank, 1, MAX_TOKENS),
            ("num_experts_per_tok", self.top_k, 1, MAX_TOP_K),
            ("num_physical_experts", self.num_experts, self.num_ranks, MAX_EXPERTS),
        ):
            if not least <= value <= most:
                problem = f"NVLink dispatch takes {least} to {most}"
                raise ConfigError(field, value, problem, "another dispatcher")
        if self.num_experts % self.num_ranks:
            problem = f"not a multiple of {self.num_ranks} ranks"
            missing = -self.num_experts % self.num_ranks
            fix = f"{self.num_experts + missing}, by redundant experts"
            raise ConfigError("num_physical_experts", self.num_experts, problem, fix)
        if self.hidden_size % GROUP:
            problem = "not a multiple of 128"
            raise ConfigError("hidden_size", self.hidden_size, problem, "another model")

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.num_experts // self.num_ranks

    @property
    def num_slots(self) -> int:
        """Tokens of all ranks, R * T."""
        return self.num_ranks * self.max_tokens_per_rank

    @property
    def rows_per_expert(self) -> int:
        """M: all tokens of all ranks may choose the same expert."""
        return max_masked_rows(self.num_slots)

    @property
    def row_bytes(self) -> int:
        """Of a packed row."""
        return packed_row_bytes(self.hidden_size)

    @property
    def halves(self) -> int:
        """Bytes before the half of even transfers."""
        return 2 * LINE

    @property
    def routes(self) -> int:
        """Bytes before the routes in a half; the tallies are its beginning."""
        return round_up(4 * self.num_ranks * (self.num_local_experts + 1))

    @property
    def rows(self) -> int:
        """Bytes before the rows in a half."""
        return self.routes + round_up(8 * self.top_k * self.num_slots)

    @property
    def slot_bytes(self) -> int:
        """Of one rank's sums in a half."""
        return 2 * self.max_tokens_per_rank * self.hidden_size

    @property
    def half_bytes(self) -> int:
        """Of one half."""
        dispatched = self.rows + self.num_slots * self.row_bytes
        combined = self.num_ranks * self.slot_bytes
        return round_up(max(dispatched, combined))

    @property
    def buffer_bytes(self) -> int:
        """Memory of each rank that its peers can write."""
        return self.halves + 2 * self.half_bytes

    @property
    def received_bytes(self) -> int:
        """Device memory of one dispatch's result, outside of the buffer."""
        rows = self.num_local_experts * self.rows_per_expert
        return rows * (self.hidden_size + 4 * self.hidden_size // GROUP) + (
            8 * self.top_k * self.num_slots
        )

    def expected_rows(self, num_tokens: int) -> int:
        """Return the mean rows of an expert if every rank brings `num_tokens`, at least 1."""
        return guess_rows(self.num_ranks * num_tokens, self.top_k, self.num_experts)


def round_up(num_bytes: int) -> int:
    """Return the bytes of a part of a buffer: whole lines."""
    return -(-num_bytes // LINE) * LINE
