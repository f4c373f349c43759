"""Other ways for the ranks of a group to sum and gather rows than the library's collectives."""

from typing import Protocol

from torch import Tensor

from engine.parallel.pair_rows import PairRows
from engine.parallel.pending import Pending


class PeerSums(Protocol):
    """Another way to sum rows over the ranks of a group than the library's, open on all of them."""

    def takes(self, partial_PD: Tensor) -> bool:
        """Return whether it sums such rows: the same on all ranks."""
        ...

    def start(self, partial_PD: Tensor, own: Pending[Tensor] | None = None) -> Pending[Tensor]:
        """See `RankGroup.start_reduce_scatter`; not for two sums in flight."""
        ...

    def takes_pairs(self, pairs: PairRows) -> bool:
        """Return whether it sums such rows: the same on all ranks."""
        ...

    def start_pairs(self, pairs: PairRows, own: Pending[Tensor] | None = None) -> Pending[Tensor]:
        """See `RankGroup.start_sum_of_pairs`; not for two sums in flight."""
        ...


class PeerGathers(Protocol):
    """Another way to gather rows than the library's, open on all ranks of a group."""

    def takes(self, rows_tX: Tensor) -> bool:
        """Return whether it gathers such rows now: the same on all ranks."""
        ...

    def start(self, rows_tX: Tensor) -> Pending[Tensor]:
        """See `RankGroup.start_all_gather`; the result is read before the next sum is sent."""
        ...

    def met(self) -> None:
        """Hear that all ranks have read what was gathered: their next sums have come."""
        ...
