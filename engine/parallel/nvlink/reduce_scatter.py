"""Sums over the GPUs of one NVLink host, of which each gets its share of the rows.

For tensor-parallel prefill, whose ranks end every half layer with a part of a sum for all tokens.
A transfer is one of the package: *send* writes each peer's rows of the part into that peer's
buffer, *receive* waits for all of them and adds up, in float32 and in the order of ranks, with what
the rank adds of its own. A library's ring passes sums on from rank to rank, rounded at every hop,
and needs a start and an end of its own for each call, which is most of the time of few tokens.

What experts return is sent before it is summed per token (`start_pairs`): *send* then makes each
token's sum and writes it, instead of reading what another kernel has written, and skips tokens that
have none of the rank's experts. The receiver knows from its own routing who sends for which token.

A transfer whose sums were sent has to be received before the next is sent, so this is not for steps
that keep two in flight (two micro-batches in turns).

Legend: R ranks, T most rows of a rank, t rows of a rank now, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.invariants import require_in_turn
from engine.parallel.nvlink.shape import LINE, MAX_RANKS, round_up
from engine.parallel.pair_rows import PairRows
from engine.parallel.pending import Deferred, Pending, wait_for
from runtime.errors import ConfigError

ALIGNMENT = 8
"""Of the hidden size: programs copy 16 bytes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceShape:
    """The sizes of one exchange of sums, equal on all ranks, and where everything lies.

    A rank's buffer is a line of counters for each parity of transfers, then a half for each: R
    slots of T rows, by the rank that has sent them. Its own slot is used for pairs alone.

    Attributes:
        num_ranks: R.
        max_rows: T.
        hidden_size: D.

    Raises:
        ConfigError: sizes that the kernels do not take.
    """

    num_ranks: int
    max_rows: int
    hidden_size: int

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= MAX_RANKS:
            problem = f"sums by NVLink stores take 2 to {MAX_RANKS} ranks"
            raise ConfigError("tp", self.num_ranks, problem, "collectives")
        if self.hidden_size % ALIGNMENT:
            problem = f"not a multiple of {ALIGNMENT}"
            raise ConfigError("hidden_size", self.hidden_size, problem, "collectives")

    @property
    def halves(self) -> int:
        """Bytes before the half of even transfers."""
        return 2 * LINE

    @property
    def slot_bytes(self) -> int:
        """Of one rank's rows in a half."""
        return round_up(2 * self.max_rows * self.hidden_size)

    @property
    def half_bytes(self) -> int:
        """Of one half."""
        return self.num_ranks * self.slot_bytes

    @property
    def buffer_bytes(self) -> int:
        """Memory of each rank that its peers can write."""
        return self.halves + 2 * self.half_bytes


class SumKernels(Protocol):
    """The kernels of a rank: a send and a receive of rows, and of sums of pairs."""

    def send(self, partial_PD: Tensor) -> None:
        """Write the peers' rows of this rank's part, contiguous, into their buffers."""
        ...

    def receive(self, partial_PD: Tensor, own_TD: Tensor | None) -> Tensor:
        """Wait for all ranks' parts of this rank's rows, and add them up with `own_TD`."""
        ...

    def send_pairs(self, pairs: PairRows) -> None:
        """Write the sums of every rank's tokens into its buffer; weights are contiguous."""
        ...

    def receive_pairs(self, pairs: PairRows, own_TD: Tensor | None) -> Tensor:
        """Wait for all ranks' sums of this rank's tokens, and add them up with `own_TD`."""
        ...


class NvlinkReduceScatter:
    """Starts sums, and sees to their order; see `engine.parallel.peer_exchange.PeerSums`."""

    def __init__(
        self, shape: ReduceShape, kernels: SumKernels, close: Callable[[], None] = lambda: None
    ) -> None:
        """Begin with no transfer under way.

        Args:
            shape: equal on all ranks.
            kernels: of this rank.
            close: gives the memory back; all ranks together, with no transfer under way.
        """
        self.shape, self.kernels, self.close = shape, kernels, close
        self._under_way = ""

    def takes(self, partial_PD: Tensor) -> bool:
        """Return whether a sum fits: bfloat16 rows of D, at most T of each rank."""
        size = self.shape.hidden_size
        is_row = partial_PD.dim() == 2 and partial_PD.shape[1] == size
        is_short = partial_PD.shape[0] <= self.shape.max_rows * self.shape.num_ranks
        return is_row and is_short and partial_PD.dtype == torch.bfloat16

    def start(self, partial_PD: Tensor, own: Pending[Tensor] | None = None) -> Pending[Tensor]:
        """Send this rank's part; waiting receives the sum [t, D] of its own rows.

        Args:
            partial_PD: [R * t, D] that `takes` says yes to; not changed, and read until then.
            own: [t, D], added on this rank.
        """
        self._begin()
        partial_PD = partial_PD.contiguous()
        self.kernels.send(partial_PD)
        return self._received(lambda: self.kernels.receive(partial_PD, wait_for(own)))

    def takes_pairs(self, pairs: PairRows) -> bool:
        """Return whether sums of such rows fit; those of all ranks do, or of none."""
        num_tokens, rest = divmod(pairs.places_PK.shape[0], self.shape.num_ranks)
        is_row = pairs.rows_MD.shape[1:] == (self.shape.hidden_size,)
        return (
            is_row
            and not rest
            and num_tokens <= self.shape.max_rows
            and pairs.rows_MD.dtype == torch.bfloat16
        )

    def start_pairs(self, pairs: PairRows, own: Pending[Tensor] | None = None) -> Pending[Tensor]:
        """Send the sums of this rank's rows; waiting receives those [T, D] of its own tokens.

        Args:
            pairs: that `takes_pairs` says yes to; not changed, and read until then.
            own: [T, D], added on this rank.
        """
        self._begin()
        # Copied: whoever has received this sum may write again what was gathered, and the sums for
        # the ranks behind him are still being made.
        weights = pairs.weights_PK.clone(memory_format=torch.contiguous_format)
        ready = replace(pairs, weights_PK=weights, own_ids_TK=pairs.own_ids_TK.contiguous())
        self.kernels.send_pairs(ready)
        return self._received(lambda: self.kernels.receive_pairs(ready, wait_for(own)))

    def _begin(self) -> None:
        require_in_turn("reduce-scatter", self._under_way)
        self._under_way = "reduce-scatter"

    def _received(self, receive: Callable[[], Tensor]) -> Pending[Tensor]:
        """Return what ends the transfer when it is waited for."""

        def finish() -> Tensor:
            self._under_way = ""
            return receive()

        return Deferred(finish)
