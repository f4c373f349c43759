"""The kernels of a rank, bound to its window; imported only where Triton is installed."""

from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.invariants import require
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
        shape = self.window.shape
        wanted = (shape.num_local_experts, shape.rows_per_expert, shape.hidden_size)
        require(
            out_LMD.shape == wanted,
            "experts' output",
            tuple(out_LMD.shape),
            f"{wanted} is wanted, as many rows as were laid out",
        )
        places_TK = received.places.rows_TK
        sum_kernels.send_sums(self.window, out_LMD.flatten(0, 1), places_TK, received.weights)

    def receive_sums(self, ids_TK: Tensor, own_TD: Tensor | None) -> Tensor:
        """See `Exchange`."""
        num_local = self.window.shape.num_local_experts
        return sum_kernels.receive_sums(self.window, ids_TK, own_TD, num_local_experts=num_local)
