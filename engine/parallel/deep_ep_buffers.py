"""Transfers through DeepEP's buffers, in its two modes; the library itself is a value given to us.

`NormalBuffer` moves many tokens between the GPUs of one host and tells the host how many arrived;
`LowLatencyBuffer` moves few, with fixed shapes, and can be captured in CUDA graphs.

The key idea: a transfer is started and awaited in two calls. In normal mode it runs on the
library's own stream and starts as soon as its input is ready, however much work the other
micro-batch has launched since; in low-latency mode a start launches the sending only, and waiting
launches the receiving, so that no SM is held in between.

What is not here: opening (`deep_ep`), layouts of experts, weights and the shared expert (the
dispatchers).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.invariants import require_in_turn
from engine.parallel.deep_ep_shape import LowLatencyShape, NormalShape
from engine.parallel.deep_ep_waits import WaitCosts
from engine.parallel.pending import Deferred, Pending
from runtime.errors import PeerLostError

LibraryHandle: TypeAlias = object
Received: TypeAlias = tuple[Tensor, Tensor]


class LibraryEvent(Protocol):
    """A point of a stream."""

    def current_stream_wait(self) -> None:
        """Let the current stream wait for it."""
        ...


class LibraryBuffer(Protocol):
    """What we use of the library's `Buffer`, with its own names."""

    def capture(self) -> LibraryEvent: ...  # noqa: D102
    def destroy(self) -> None: ...  # noqa: D102

    def get_dispatch_layout(  # noqa: D102
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: LibraryEvent | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, LibraryEvent]: ...

    def dispatch(  # noqa: D102
        self,
        x: Received,
        *,
        num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: Tensor | None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        expert_alignment: int,
        config: object,
        previous_event: LibraryEvent,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> tuple[Received, Tensor, Tensor, list[int], LibraryHandle, LibraryEvent]: ...

    def combine(  # noqa: D102
        self,
        x: Tensor,
        handle: LibraryHandle,
        *,
        bias: Tensor | None,
        config: object,
        async_finish: bool,
    ) -> tuple[Tensor, Tensor | None, LibraryEvent]: ...

    def low_latency_dispatch(  # noqa: D102
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *,
        use_fp8: bool,
        return_recv_hook: bool,
        cumulative_local_expert_recv_stats: Tensor | None,
        dispatch_wait_recv_cost_stats: Tensor | None,
    ) -> tuple[Received, Tensor, LibraryHandle, LibraryEvent, Callable[[], None]]: ...

    def low_latency_combine(  # noqa: D102
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LibraryHandle,
        *,
        return_recv_hook: bool,
        combine_wait_recv_cost_stats: Tensor | None,
    ) -> tuple[Tensor, LibraryEvent, Callable[[], None]]: ...


@contextmanager
def peers_alive(what: str) -> Iterator[None]:
    """Turn the library's RuntimeError (a timeout, a peer that is gone) into ours."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerLostError(f"another rank was lost in {what}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What a normal dispatch brought.

    Attributes:
        rows: [N, D], one row per token that chose any local expert; scales row-major.
        topk_ids_NK: int64 local experts, -1 for experts of other ranks.
        topk_weights_NK: float32.
        num_rows_per_expert: of each local expert, rounded up to the alignment.
        handle: for the way back.
    """

    rows: Fp8Rows
    topk_ids_NK: Tensor
    topk_weights_NK: Tensor
    num_rows_per_expert: list[int]
    handle: LibraryHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalConfigs:
    """The library's tuning values for the two directions; opaque here."""

    dispatch: object
    combine: object


class NormalBuffer:
    """Transfers of many tokens inside one host; see the module. Not for CUDA graphs."""

    def __init__(self, library: LibraryBuffer, shape: NormalShape, configs: NormalConfigs) -> None:
        self.shape = shape
        self._library = library
        self._configs = configs

    def start_dispatch(
        self, rows: Fp8Rows, topk_ids_TK: Tensor, topk_weights_TK: Tensor, *, alignment: int
    ) -> Pending[Arrived]:
        """Count tokens per rank now; `wait` sends, blocks the host for the counts, and returns.

        The transfer waits for the work that is launched at this call, not at the call of `wait`.

        Args:
            rows: [T, D]; T may be 0. Scales may have any strides.
            topk_ids_TK: [T, K] int64 physical experts.
            topk_weights_TK: [T, K] float32.
            alignment: that received counts are rounded up to.
        """
        ids, weights = topk_ids_TK.contiguous(), topk_weights_TK.contiguous()
        x = (rows.data_TK.contiguous(), rows.scale_TG)
        ready = self._library.capture()
        # Allocated on the library's stream: memory of this stream may still be in use by work that
        # the transfer does not wait for.
        per_rank, per_host, per_expert, is_in_rank, event = self._library.get_dispatch_layout(
            ids, self.shape.num_experts, ready, True, True
        )

        def receive() -> Arrived:
            with peers_alive("dispatch"):
                (data, scale), ids_NK, weights_NK, counts, handle, arrived = self._library.dispatch(
                    x,
                    num_tokens_per_rank=per_rank,
                    num_tokens_per_rdma_rank=per_host,
                    is_token_in_rank=is_in_rank,
                    num_tokens_per_expert=per_expert,
                    topk_idx=ids,
                    topk_weights=weights,
                    expert_alignment=alignment,
                    config=self._configs.dispatch,
                    previous_event=event,
                    async_finish=True,
                    allocate_on_comm_stream=True,
                )
            arrived.current_stream_wait()
            return Arrived(
                rows=Fp8Rows(data_TK=data, scale_TG=scale),
                topk_ids_NK=ids_NK,
                topk_weights_NK=weights_NK,
                num_rows_per_expert=counts,
                handle=handle,
            )

        return Deferred(receive)

    def start_combine(
        self, out_ND: Tensor, handle: LibraryHandle, own_TD: Tensor | None
    ) -> Pending[Tensor]:
        """Send [N, D] bfloat16 rows home; waiting gives the plain sum per token plus `own_TD`."""
        bias = None if own_TD is None else own_TD.contiguous()
        summed, _, event = self._library.combine(
            out_ND, handle, bias=bias, config=self._configs.combine, async_finish=True
        )

        def receive() -> Tensor:
            event.current_stream_wait()
            return summed

        return Deferred(receive)

    def close(self) -> None:
        """Free the memory; all ranks together, with no transfer under way."""
        self._library.destroy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """What a low-latency dispatch brought, for L local experts with M rows each.

    Attributes:
        data_LMD: e4m3; rows beyond an expert's count are garbage.
        scale_LMG: float32, column after column.
        num_rows_L: int32 on the device.
        handle: for the way back.
    """

    data_LMD: Tensor
    scale_LMG: Tensor
    num_rows_L: Tensor
    handle: LibraryHandle


class LowLatencyBuffer:
    """Transfers of few tokens in fixed shapes; see the module.

    The library alternates between two halves of its memory, and each sending clears the flags of
    the other half: a sending must therefore follow the receiving of the one before it. The order is
    checked here, because breaking it hangs all ranks.

    Attributes:
        shape: of the transfers.
        costs: what the kernels count of their waits; None for nothing.
    """

    def __init__(
        self, library: LibraryBuffer, shape: LowLatencyShape, costs: WaitCosts | None = None
    ) -> None:
        self.shape, self.costs = shape, costs
        self._library = library
        self._under_way = ""

    def start_dispatch(self, hidden_TD: Tensor, topk_ids_TK: Tensor) -> Pending[Masked]:
        """Send tokens, quantised on the way; waiting receives those for the local experts.

        Args:
            hidden_TD: [T, D] bfloat16; T from 0 to `max_tokens_per_rank`.
            topk_ids_TK: [T, K] int64 physical experts, -1 for none.
        """
        self._send("dispatch")
        costs = self.costs
        (data, scale), counts, handle, _, hook = self._library.low_latency_dispatch(
            hidden_TD.contiguous(),
            topk_ids_TK.contiguous(),
            self.shape.max_tokens_per_rank,
            self.shape.num_experts,
            use_fp8=True,
            return_recv_hook=True,
            cumulative_local_expert_recv_stats=None if costs is None else costs.rows_L,
            dispatch_wait_recv_cost_stats=None if costs is None else costs.dispatch_R,
        )

        def receive() -> Masked:
            self._receive(hook)
            return Masked(data_LMD=data, scale_LMG=scale, num_rows_L=counts, handle=handle)

        return Deferred(receive)

    def start_combine(
        self,
        out_LMD: Tensor,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        handle: LibraryHandle,
    ) -> Pending[Tensor]:
        """Send the experts' rows home; waiting gives the sum per token, weighted.

        Args:
            out_LMD: [L, M, D] bfloat16, not weighted.
            topk_ids_TK: of the dispatch.
            topk_weights_TK: [T, K] float32.
            handle: of the dispatch.
        """
        self._send("combine")
        summed, _, hook = self._library.low_latency_combine(
            out_LMD,
            topk_ids_TK.contiguous(),
            topk_weights_TK.contiguous(),
            handle,
            return_recv_hook=True,
            combine_wait_recv_cost_stats=None if self.costs is None else self.costs.combine_R,
        )

        def receive() -> Tensor:
            self._receive(hook)
            return summed

        return Deferred(receive)

    def close(self) -> None:
        """Free the memory; all ranks together, with no transfer under way."""
        self._library.destroy()

    def _send(self, what: str) -> None:
        require_in_turn(what, self._under_way)
        self._under_way = what

    def _receive(self, hook: Callable[[], None]) -> None:
        with peers_alive(self._under_way):
            hook()
        self._under_way = ""
