"""Choose the rows of the aligned layout, hardly more than there are, without idling the device.

Grouped products want the number of rows on the host, and it is known on the device only after
routing. The key idea: counting runs beside the main stream and its result is copied to pinned
memory while other work (the shared expert) is running; whoever needs the rows waits for the copy
alone, not for what was launched meanwhile.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.alignment import Alignment, RowCounts
from engine.kernels.base import Kernels
from engine.parallel.pending import Pending, Then


class RowPlacer:
    """Of the experts [first, first + num_experts) of this rank."""

    def __init__(self, kernels: Kernels, first: int, num_experts: int) -> None:
        self._kernels = kernels
        self._first, self._num_experts = first, num_experts
        self._stream: torch.cuda.Stream | None = None
        self._unused: list[Tensor] = []  # [1] int32 in pinned memory, to be used again

    def start(self, topk_ids_TK: Pending[Tensor], device: torch.device) -> Pending[Alignment]:
        """Start to place the (token, expert) pairs.

        Args:
            topk_ids_TK: [T, K] int64 or int32 physical experts, on their way; waited for beside
                the stream.
            device: that they are on.
        """
        if device.type != "cuda":
            return Then(topk_ids_TK, self._place_now)
        if torch.cuda.is_current_stream_capturing():
            # A graph has one shape and no host: as many rows as any routing could need.
            return Then(topk_ids_TK, self._place_upper_bound)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # What this stream allocates may be reused when the main stream has launched its readers;
        # waiting for the main stream first makes that safe.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            counts = self._count(topk_ids_TK.wait())
            num_rows = self._take_pinned()
            num_rows.copy_(counts.num_rows, non_blocking=True)
            done = self._stream.record_event()
        return _Counting(self._kernels, counts, num_rows, done, self._unused)

    def _take_pinned(self) -> Tensor:
        if self._unused:
            return self._unused.pop()
        # Born in inference mode, it could not be written to outside of it.
        with torch.inference_mode(False):
            return torch.empty(1, dtype=torch.int32, pin_memory=True)

    def _count(self, topk_ids_TK: Tensor) -> RowCounts:
        return self._kernels.count_rows(topk_ids_TK, self._first, self._num_experts)

    def _place_now(self, topk_ids_TK: Tensor) -> Alignment:
        counts = self._count(topk_ids_TK)
        return self._kernels.place_rows(counts, counts.rows_to_lay_out(int(counts.num_rows)))

    def _place_upper_bound(self, topk_ids_TK: Tensor) -> Alignment:
        return self._kernels.align_to_experts(topk_ids_TK, self._first, self._num_experts)


@dataclass(frozen=True, slots=True)
class _Counting:
    """Counts on their way to the host; `num_rows` is in pinned memory, and then in `unused`."""

    kernels: Kernels
    counts: RowCounts
    num_rows: Tensor
    done: torch.cuda.Event
    unused: list[Tensor]

    def wait(self) -> Alignment:
        self.done.synchronize()
        torch.cuda.current_stream().wait_event(self.done)
        num_rows = self.counts.rows_to_lay_out(int(self.num_rows))
        self.unused.append(self.num_rows)
        return self.kernels.place_rows(self.counts, num_rows)
