"""One rank's buffer of an exchange: transfers are started and awaited here, in the right order.

The key idea is in the package: a sending follows the receiving of the transfer before it. The order
is checked, because breaking it corrupts tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.invariants import require_in_turn
from engine.kernels.masked_rows import MaskedPlaces, MaskedRows
from engine.parallel.device_waits import DeviceWaits
from engine.parallel.nvlink.shape import NvlinkShape
from engine.parallel.pending import Deferred, Pending, wait_for


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRows:
    """What a dispatch has brought.

    Attributes:
        rows: at their experts, in the order of ranks and tokens.
        places: of the tokens of all ranks, [R * T, K].
        weights: [R * T, K] float32; 0 where there is no place.
    """

    rows: MaskedRows
    places: MaskedPlaces
    weights: Tensor


class Exchange(Protocol):
    """The four kernels of a rank."""

    def send_rows(self, rows: Fp8Rows, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """Write the tokens into the peers' buffers; contiguous ids and weights."""
        ...

    def receive_rows(self, expected_rows: int) -> ReceivedRows:
        """Wait for all ranks' tokens, and place them at their experts."""
        ...

    def send_sums(self, out_LMD: Tensor, received: ReceivedRows) -> None:
        """Write the experts' output, weighted and summed per token, into its owner's buffer."""
        ...

    def receive_sums(self, ids_TK: Tensor, own_TD: Tensor | None) -> Tensor:
        """Wait for all ranks' sums, and add them up with `own_TD`."""
        ...


class NvlinkBuffer:
    """See the module; made by `open_nvlink_buffer`."""

    def __init__(
        self,
        shape: NvlinkShape,
        exchange: Exchange,
        close: Callable[[], None] = lambda: None,
        *,
        waits: DeviceWaits | None = None,
    ) -> None:
        """Begin with no transfer under way.

        Args:
            shape: equal on all ranks.
            exchange: of this rank.
            close: gives the memory back; all ranks together, with no transfer under way.
            waits: reads what is recorded of transfers; None where nothing is.
        """
        self.shape = shape
        self.close = close
        self.waits = waits
        self.exchange = exchange
        self._under_way = ""

    def start_dispatch(
        self, rows: Fp8Rows, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[ReceivedRows]:
        """Send tokens; waiting receives those of the local experts.

        Args:
            rows: from 0 to T tokens, of any layout.
            topk_ids_TK: [., K] int64 physical experts, -1 for none.
            topk_weights_TK: [., K] float32.
        """
        self._send("dispatch")
        num_tokens = topk_ids_TK.shape[0]
        self.exchange.send_rows(rows, topk_ids_TK.contiguous(), topk_weights_TK.contiguous())

        def receive() -> ReceivedRows:
            self._under_way = ""
            return self.exchange.receive_rows(self.shape.expected_rows(num_tokens))

        return Deferred(receive)

    def start_combine(
        self,
        out_LMD: Tensor,
        received: ReceivedRows,
        topk_ids_TK: Tensor,
        own: Pending[Tensor] | None,
    ) -> Pending[Tensor]:
        """Send experts' sums home; waiting gives those of the own tokens, and `own`, together.

        Args:
            out_LMD: [L, M, D] bfloat16, not weighted.
            received: by the dispatch.
            topk_ids_TK: of the dispatch.
            own: [., D] bfloat16 or None.
        """
        self._send("combine")
        self.exchange.send_sums(out_LMD, received)

        def receive() -> Tensor:
            self._under_way = ""
            return self.exchange.receive_sums(topk_ids_TK.contiguous(), wait_for(own))

        return Deferred(receive)

    def _send(self, what: str) -> None:
        require_in_turn(what, self._under_way)
        self._under_way = what
