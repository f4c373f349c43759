"""Collectives between the GPUs of one host by copy engines: no multiprocessor moves a byte.

`SymmetricGroup` has the asynchronous collectives of `RankGroup` and gives the same results, but for
rounding: partial sums are added in float32 and rounded once. The key idea: matrix products of a
large batch occupy every multiprocessor until they end, so a collective that runs as a kernel either
waits for them or slows them down. Here each rank has a *symmetric buffer* that its peers can read
and write; copies and signals are work of the GPU's front end (`symmetric_driver`), and only the sum
of a reduce-scatter is a kernel. In which order all that happens, and why no buffer is overwritten
too early and nothing waits for ever, is written in `symmetric_schedule`.

Rules for callers: all ranks start the same collectives in the same order; every `Pending` is waited
for, on the stream that it was started on; the input is not written before that. What does not fit
the buffer, lies elsewhere than on the group's device, or is being captured into a graph goes the
ordinary way, by `RankGroup`.

A rank that dies leaves its peers' streams waiting, without a time limit; whoever watches the
processes ends them all.

Multicast is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.invariants import require
from engine.kernels import reference
from engine.parallel.groups import RankGroup
from engine.parallel.pending import Pending
from engine.parallel.symmetric_driver import (
    CudaSideStreams,
    DriverSignals,
    KernelSignals,
    SideStreams,
    make_streams,
)
from engine.parallel.symmetric_memory import map_peer_memory
from engine.parallel.symmetric_schedule import (
    FIRST_TRANSFER,
    REDUCE,
    STAGE,
    BufferPlan,
    Kind,
    Schedule,
    Step,
)

logger = logging.getLogger(__name__)


class SumSlices(Protocol):
    """Adds slices in float32 on the current stream; see `engine.kernels.reference.sum_slices`."""

    def __call__(
        self, slices_RTD: Tensor, out_TD: Tensor | None = None, *, residual_TD: Tensor | None = None
    ) -> Tensor:
        """Return the sum over the first dimension and the residual."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SymmetricOptions:
    """How a group's buffer is laid out and used.

    Attributes:
        max_bytes: most bytes of a reduce-scatter's input and of an all-gather's result; the buffer
            takes num_slots * max_bytes on every rank.
        num_slots: collectives of a kind that can fly at once before one waits for an older one.
        num_transfers: streams that copy at the same time.
        kernel_signals: signal by torch's kernels, which have a time limit but need a
            multiprocessor; otherwise by the driver.
        sum_slices: the sum of a reduce-scatter, of the kernels in use.
    """

    max_bytes: int = 256 * 2**20
    num_slots: int = 2
    num_transfers: int = 2
    kernel_signals: bool = False
    sum_slices: SumSlices = reference.sum_slices


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """A collective whose work is launched.

    Attributes:
        value: the result, complete once the side streams' work is.
        join: orders the current stream behind that.
        source: read by the side streams; held until then, so that its memory is not given to
            someone else.
    """

    value: Tensor
    join: Callable[[], None]
    source: Tensor

    def wait(self) -> Tensor:
        """Make the current stream wait; return the result."""
        self.join()
        return self.value


class SymmetricGroup:
    """One axis as seen from one rank, with collectives over symmetric memory.

    Made by `open_symmetric_group`; `close` it before the process group is destroyed.
    """

    def __init__(
        self,
        group: RankGroup,
        buffer: Tensor,
        bases: Sequence[int],
        streams: SideStreams,
        *,
        options: SymmetricOptions,
    ) -> None:
        """Use a buffer whose counters are zero on all ranks.

        Args:
            group: the axis.
            buffer: this rank's, [BufferPlan.nbytes] uint8.
            bases: address of each rank's buffer, as this rank sees it.
            streams: `Schedule.num_streams` of them.
            options: the same on all ranks.
        """
        self._group = group
        self._buffer: Tensor | None = buffer
        self._device = buffer.device
        self._bases = bases
        self._streams = streams
        self._sum_slices = options.sum_slices
        self._schedule = schedule_of(group, options)
        self._plan = plan_of(group, options)
        self._num_all_gathers = 0
        self._num_reduce_scatters = 0

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._group.size

    @property
    def nbytes(self) -> int:
        """Memory of this GPU that the buffer takes."""
        return self._plan.nbytes

    def start_all_gather(self, x: Tensor) -> Pending[Tensor]:
        """Start to concatenate the ranks' tensors of equal shape along dimension 0."""
        if not self._fits(x, x.nbytes * self.size):
            return self._group.start_all_gather(x)
        source = x.contiguous()
        result = source.new_empty((self.size * source.shape[0], *source.shape[1:]))
        number, self._num_all_gathers = self._num_all_gathers, self._num_all_gathers + 1
        slot = self._plan.all_gather_slot(self._schedule.slot(number))
        rows, out, nbytes = source.data_ptr(), result.data_ptr(), source.nbytes
        used = (STAGE, *self._schedule.transfers)
        self._streams.fork(used)
        for step in self._schedule.all_gather(number):
            match step.kind:
                case Kind.FILL:
                    self._copy(step, self._bases[self.rank] + slot, rows, nbytes)
                case Kind.KEEP:
                    self._copy(step, out + self.rank * nbytes, rows, nbytes)
                case Kind.PULL:
                    (peer,) = step.peers
                    self._copy(step, out + peer * nbytes, self._bases[peer] + slot, nbytes)
                case _:
                    self._signal(step)
        return _InFlight(value=result, join=self._streams.join(used), source=source)

    def start_reduce_scatter(self, x_TD: Tensor) -> Pending[Tensor]:
        """Start to sum the ranks' tensors and keep this rank's T / size rows of the sum.

        Args:
            x_TD: [T, ...], T divisible by the number of ranks.
        """
        if not self._fits(x_TD, x_TD.nbytes):
            return self._group.start_reduce_scatter(x_TD)
        num_rows = x_TD.shape[0]
        require(num_rows % self.size == 0, "rows", num_rows, f"a multiple of {self.size} is wanted")
        source = x_TD.contiguous()
        shape = (source.shape[0] // self.size, *source.shape[1:])
        result = source.new_empty(shape)
        number, self._num_reduce_scatters = (
            self._num_reduce_scatters,
            self._num_reduce_scatters + 1,
        )
        slot = self._plan.reduce_slot(self._schedule.slot(number))
        slices, nbytes = source.data_ptr(), result.nbytes
        used = (REDUCE, *self._schedule.transfers)
        self._streams.fork(used)
        for step in self._schedule.reduce_scatter(number):
            match step.kind:
                case Kind.PUSH:
                    (peer,) = step.peers
                    place = slot + self._plan.place(self.rank, peer) * nbytes
                    self._copy(step, self._bases[peer] + place, slices + peer * nbytes, nbytes)
                case Kind.SUM:
                    first = self.rank * shape[0]
                    self._sum(slot, source[first : first + shape[0]], result)
                case _:
                    self._signal(step)
        return _InFlight(value=result, join=self._streams.join(used), source=source)

    def close(self) -> None:
        """Give the buffer back, once no peer uses it; all ranks call, with nothing in flight."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._group.barrier()
        self._buffer = None

    def _fits(self, x: Tensor, nbytes: int) -> bool:
        return (
            self._buffer is not None
            and x.device == self._device
            and 0 < nbytes <= self._plan.slice_bytes * self.size
            and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
        )

    def _copy(self, step: Step, destination: int, source: int, nbytes: int) -> None:
        self._streams.copy(step.stream, destination, source, nbytes)

    def _signal(self, step: Step) -> None:
        launch = self._streams.wait if step.kind is Kind.WAIT else self._streams.put
        launch(step.stream, step.peers, step.channel, step.generation)

    def _sum(self, slot: int, own: Tensor, result: Tensor) -> None:
        assert self._buffer is not None
        num_peers = self.size - 1
        arrived = self._buffer[slot : slot + result.nbytes * num_peers].view(result.dtype)
        slices = arrived.view(num_peers, result.shape[0], -1)
        out = result.view(result.shape[0], -1)
        with self._streams.on(REDUCE):
            self._sum_slices(slices, out, residual_TD=own.reshape(out.shape))


def open_symmetric_group(
    group: RankGroup, device: torch.device, options: SymmetricOptions | None = None
) -> SymmetricGroup | None:
    """Allocate the buffer on every rank and let the ranks map each other's; all ranks call.

    Args:
        group: the axis; its ranks have one GPU each.
        device: of this rank.
        options: the same on all ranks.

    Returns:
        None where the ranks cannot read each other's memory: one rank, no GPU, several hosts.
    """
    options = options or SymmetricOptions()
    plan = plan_of(group, options)
    memory = map_peer_memory(group, device, plan.nbytes, num_zeros=plan.counter_bytes)
    if memory is None:
        return None
    logger.info(
        "opened symmetric memory ranks=%d bytes=%d signals=%s",
        group.size,
        plan.nbytes,
        "kernel" if options.kernel_signals else "driver",
    )
    bases = memory.addresses
    streams = make_streams(device, schedule_of(group, options).num_streams, FIRST_TRANSFER)
    signals = (
        KernelSignals(streams, memory.handle)
        if options.kernel_signals
        else DriverSignals(streams, *counters_of(plan, group.rank, bases))
    )
    side_streams = CudaSideStreams(device, streams, signals)
    return SymmetricGroup(group, memory.buffer, bases, side_streams, options=options)


def schedule_of(group: RankGroup, options: SymmetricOptions) -> Schedule:
    """Return the order of this rank's steps."""
    return Schedule(
        rank=group.rank,
        size=group.size,
        num_slots=options.num_slots,
        num_transfers=max(1, min(options.num_transfers, group.size - 1)),
    )


def plan_of(group: RankGroup, options: SymmetricOptions) -> BufferPlan:
    """Return the layout of every rank's buffer."""
    return BufferPlan(
        size=group.size,
        num_slots=options.num_slots,
        num_channels=schedule_of(group, options).num_channels,
        max_bytes=options.max_bytes,
    )


def counters_of(
    plan: BufferPlan, rank: int, bases: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return addresses of counters: [channel][sender] here, and [channel][reader] at the peers."""
    channels = range(plan.num_channels)
    own = [
        [bases[rank] + plan.counter(channel, sender) for sender in range(plan.size)]
        for channel in channels
    ]
    peers = [[base + plan.counter(channel, rank) for base in bases] for channel in channels]
    return own, peers
