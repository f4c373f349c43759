"""How many rows come to a rank's experts: a dispatcher around another one, which counts."""

from typing import Any

from torch import Tensor

from engine.formats.expert_rows import ExpertRows, Rows
from engine.kernels.masked_rows import MaskedRows
from engine.parallel.groups import RankGroup
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.pending import Pending, Then
from engine.parallel.row_formats import ExpertShare, PlainRows, SortedPairs


def local_dispatcher(num_experts: int) -> LocalDispatcher[SortedPairs]:
    """For a rank alone, in the compute dtype."""
    share = ExpertShare(first=0, num_local=num_experts, num_ranks=1)
    return LocalDispatcher(PlainRows(share), RankGroup())


class CountingDispatcher:
    """Counts in `num_rows` while `is_counting`, which reads the device: not during a capture."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.takes_quantized = inner.takes_quantized
        self.num_rows = 0
        self.is_counting = True

    def start_dispatch(self, hidden: Any, ids: Tensor, weights: Tensor) -> Pending[Any]:
        def count(arrived: tuple[Rows, Any]) -> tuple[Rows, Any]:
            if self.is_counting:
                self.num_rows += _count(arrived[0])
            return arrived

        return Then(self._inner.start_dispatch(hidden, ids, weights), count)

    def start_combine(self, out: Tensor, handle: Any, own: Any) -> Pending[Tensor]:
        combined: Pending[Tensor] = self._inner.start_combine(out, handle, own)
        return combined


def _count(rows: Rows) -> int:
    if isinstance(rows, MaskedRows):
        return int(rows.num_rows_L.sum())
    assert isinstance(rows, ExpertRows)
    return len(rows.rows_MD)
