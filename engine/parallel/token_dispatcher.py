"""The seam between routing and experts: bring tokens to the experts they chose, and back.

A dispatch returns rows for this rank's experts and a handle; a combine consumes the handle and the
experts' output. Both are started and waited for, so that other work covers the journey. The key
idea: the MoE layer is the same however tokens are dispatched, and an implementation is chosen once,
when the model is built.

Legend: T tokens of this rank, D hidden size, K experts per token, L local physical experts,
M rows received by them (a token counts once for each of its local experts).
"""

from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from engine.formats.expert_rows import Rows
from engine.formats.fp8_rows import Activation
from engine.kernels.masked_rows import MaskedRoom
from engine.parallel.pending import Pending

Handle = TypeVar("Handle")


class TokenDispatcher(Protocol[Handle]):
    """One way to dispatch tokens. Each dispatch is followed by its combine.

    Ranks make the same calls in the same order. Two micro-batches of prefill may be under way at a
    time; steps of decode start a transfer when the one before it has been waited for.

    Attributes:
        takes_quantized: whether `start_dispatch` takes quantised rows.
        waits_for_counts: whether the `wait` of a dispatch stops the host until the device has come
            so far and said how many rows there are. A step then takes as long to launch as to run
            (`ModelRunner.launch`). Otherwise nothing here ever reads the device.
    """

    takes_quantized: bool
    waits_for_counts: bool

    def start_dispatch(
        self, hidden: Activation, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> Pending[tuple[Rows, Handle]]:
        """Start to bring tokens to their experts.

        Args:
            hidden: [T, D]; T may be 0, and the call must still be made. Quantised rows if, and
                only if, `takes_quantized`.
            topk_ids_TK: [T, K] int64 physical experts, no expert twice in a row; -1 for none. Such
                a pair goes nowhere and adds nothing, whatever its weight, and of a token whose
                experts all are -1 nothing is read.
            topk_weights_TK: [T, K] float32.

        Returns:
            The rows for this rank's experts, and what `start_combine` needs to undo it.
        """
        ...

    def start_combine(
        self, expert_out_MD: Tensor, handle: Handle, own: Pending[Tensor] | None
    ) -> Pending[Tensor]:
        """Start to bring the experts' output home and sum it, weighted, per token.

        Args:
            expert_out_MD: [M, D], in the order of the rows that the dispatch returned; for
                `MaskedRows` [L, M, D].
            handle: of the dispatch.
            own: [T, D] or None, a term that this rank adds of itself (the shared expert); waited
                for as late as possible, and left unchanged. On ranks that hold the same tokens it
                is this rank's part of a sum over the ranks, so that both terms share one reduction.

        Returns:
            [T, D], complete; `own` alone, or zeros, for a token without an expert.
        """
        ...


@runtime_checkable
class MaskingDispatcher(Protocol):
    """A dispatcher whose experts are given `MaskedRows`: for whoever compiles ahead."""

    def masked_room(self, num_tokens: int, top_k: int) -> MaskedRoom:
        """Return the sizes of a step to which this rank brings so many tokens."""
        ...
