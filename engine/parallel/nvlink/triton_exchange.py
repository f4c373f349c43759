"""The kernels of a rank, bound to its window; imported only where Triton is installed."""

from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.parallel.nvlink import rows as row_kernels
from engine.parallel.nvlink import sums as sum_kernels
from engine.parallel.nvlink.buffer import ReceivedRows
from engine.parallel.nvlink.shape import NvlinkShape
from engine.parallel.nvlink.window import Window


class TritonExchange:
    """An `Exchange`; launches go to the current stream."""

    def __init__(self, window: Window[NvlinkShape]) -> None:
        self.window = window

    def send_rows(self, rows: Fp8Rows, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """See `Exchange`."""
        row_kernels.send_rows(self.window, rows, ids_TK, weights_TK)

    def receive_rows(self, expected_rows: int) -> ReceivedRows:
        """See `Exchange`."""
        return row_kernels.receive_rows(self.window, expected_rows)

    def send_sums(self, out_LMD: Tensor, received: ReceivedRows) -> None:
        """See `Exchange`."""
        sum_kernels.send_sums(self.window, out_LMD, received)

    def receive_sums(self, ids_TK: Tensor, own_TD: Tensor | None) -> Tensor:
        """See `Exchange`."""
        return sum_kernels.receive_sums(self.window, ids_TK, own_TD)
