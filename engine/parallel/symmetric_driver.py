"""Copies and signals that a GPU's front end does by itself, by calls of the CUDA driver.

A copy to or from a peer's memory runs on a copy engine; a wait and a put are operations of the
stream. None of them needs a multiprocessor, which a persistent matrix product would not give
before it ends. `torch` offers no wait on a value, hence the driver's own library through ctypes;
it is part of every CUDA installation. The order that signals make is not known to CUDA: see
`symmetric_schedule` for why it cannot deadlock.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_WAIT_GEQ, _WRITE_DEFAULT = 0, 0
"""Wait until (int32)(*address - value) >= 0; write behind a fence for all earlier writes."""


class SideStreams(Protocol):
    """Streams beside the caller's, numbered from 0, and what is launched on them."""

    def fork(self, streams: Sequence[int]) -> None:
        """Let the streams go on only behind the caller's work so far."""
        ...

    def copy(self, stream: int, destination: int, source: int, nbytes: int) -> None:
        """Copy between addresses of this GPU or its peers."""
        ...

    def put(self, stream: int, peers: Sequence[int], channel: int, generation: int) -> None:
        """Set the own counter of the channel at each of the peers, behind all earlier work."""
        ...

    def wait(self, stream: int, peers: Sequence[int], channel: int, generation: int) -> None:
        """Hold later work until the peers' counters of the channel are at the generation."""
        ...

    def on(self, stream: int) -> AbstractContextManager[object]:
        """Return a context whose launches go to the stream."""
        ...

    def join(self, streams: Sequence[int]) -> Callable[[], None]:
        """Return what lets the caller's stream go on only behind the streams' work so far."""
        ...


class Signals(Protocol):
    """How `put` and `wait` are done."""

    def put(self, stream: int, peers: Sequence[int], channel: int, generation: int) -> None:
        """See `SideStreams`."""
        ...

    def wait(self, stream: int, peers: Sequence[int], channel: int, generation: int) -> None:
        """See `SideStreams`."""
        ...


def make_streams(device: torch.device, num_streams: int, num_hasty: int) -> list[torch.cuda.Stream]:
    """Return streams; small kernels on the first ones go ahead of products that wait for room."""
    return [
        torch.cuda.Stream(device, -1 if i < num_hasty else 0)  # type: ignore[no-untyped-call]
        for i in range(num_streams)
    ]


class CudaSideStreams:
    """Streams of a GPU; copies go to the driver, which gives those between GPUs to copy engines."""

    def __init__(
        self, device: torch.device, streams: Sequence[torch.cuda.Stream], signals: Signals
    ) -> None:
        self._device = device
        self._streams = streams
        self._handles = [ctypes.c_void_p(stream.cuda_stream) for stream in streams]
        self._signals = signals
        self._driver = Driver()

    def fork(self, streams: Sequence[int]) -> None:
        """Let the streams go on only behind the caller's work so far."""
        # The driver works in the context of the thread's current device, whatever the stream.
        assert torch.cuda.current_device() == self._device.index, "call torch.cuda.set_device first"
        ready = _record(torch.cuda.current_stream(self._device))
        for stream in streams:
            self._streams[stream].wait_event(ready)

    def copy(self, stream: int, destination: int, source: int, nbytes: int) -> None:
        """Copy between addresses of this GPU or its peers."""
        self._driver.call(
            "cuMemcpyAsync",
            ctypes.c_uint64(destination),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            self._handles[stream],
        )

    def put(self, stream: int, peers: Sequence[int], channel: int, generation: int) -> None:
        """Set the own counter of the channel at each of the peers, behind all earlier work."""
        self._signals.put(stream, peers, channel, generation)

    def wait(self, stream: int, peers: Sequence[int], channel: int, generation: int) -> None:
        """Hold later work until the peers' counters of the channel are at the generation."""
        self._signals.wait(stream, peers, channel, generation)

    def on(self, stream: int) -> AbstractContextManager[object]:
        """Return a context whose launches go to the stream."""
        return torch.cuda.stream(self._streams[stream])

    def join(self, streams: Sequence[int]) -> Callable[[], None]:
        """Return what lets the caller's stream go on only behind the streams' work so far."""
        ends = [_record(self._streams[stream]) for stream in streams]

        def wait() -> None:
            current = torch.cuda.current_stream(self._device)
            for end in ends:
                current.wait_event(end)

        return wait


class Driver:
    """Calls of libcuda."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        """Call a function.

        Raises:
            RuntimeError: with the driver's name of its error.
        """
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
            reason = (text.value or b"unknown").decode()
            raise RuntimeError(f"the CUDA driver failed in {name}: {reason} ({status})")


class _StreamOperation(ctypes.Structure):
    """`CUstreamBatchMemOpParams`, whose two variants that are used here have the same fields."""

    _fields_ = [  # ctypes reads it when the class is made
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    ]


class DriverSignals:
    """The driver's operations on counters in symmetric memory.

    Counters must be zero before the first use, on all ranks.
    """

    def __init__(
        self,
        streams: Sequence[torch.cuda.Stream],
        own_counters: Sequence[Sequence[int]],
        peer_counters: Sequence[Sequence[int]],
    ) -> None:
        """Keep the addresses.

        Args:
            streams: on this GPU.
            own_counters: [channel][sender] addresses in the own buffer.
            peer_counters: [channel][reader] addresses of this rank's counter in the reader's.
        """
        self._driver = Driver()
        self._handles = [ctypes.c_void_p(stream.cuda_stream) for stream in streams]
        self._own_counters = own_counters
        self._peer_counters = peer_counters

    def put(self, stream: int, peers: Sequence[int], channel: int, generation: int) -> None:
        """Set the own counter of the channel at each of the peers, behind all earlier work."""
        addresses = [self._peer_counters[channel][peer] for peer in peers]
        self._launch(stream, _WRITE_VALUE_32, addresses, generation, _WRITE_DEFAULT)

    def wait(self, stream: int, peers: Sequence[int], channel: int, generation: int) -> None:
        """Hold later work until the peers' counters of the channel are at the generation."""
        addresses = [self._own_counters[channel][peer] for peer in peers]
        self._launch(stream, _WAIT_VALUE_32, addresses, generation, _WAIT_GEQ)

    def _launch(
        self, stream: int, operation: int, addresses: Sequence[int], value: int, flags: int
    ) -> None:
        operations = (_StreamOperation * len(addresses))(
            *(_StreamOperation(operation, address, value, flags) for address in addresses)
        )
        self._driver.call(
            "cuStreamBatchMemOp_v2",
            self._handles[stream],
            ctypes.c_uint(len(addresses)),
            operations,
            ctypes.c_uint(0),
        )


class SymmetricHandle(Protocol):
    """What is used of `torch`'s handle of symmetric memory, with its own names."""

    @property
    def buffer_ptrs(self) -> list[int]:
        """Address of each rank's buffer, as this GPU sees it."""
        ...

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Raise a flag at a rank, by a kernel on the current stream."""
        ...

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for a rank's flag and lower it, by a kernel on the current stream."""
        ...


class KernelSignals:
    """The same with torch's signal kernels: one small kernel per peer, and a time limit.

    A flag holds no number, only "raised". That is enough: each put of the schedule has exactly one
    wait, and the next put of a channel follows its wait.
    """

    def __init__(
        self,
        streams: Sequence[torch.cuda.Stream],
        handle: SymmetricHandle,
        *,
        timeout_s: float = 60.0,
    ) -> None:
        self._streams = streams
        self._handle = handle
        self._timeout_ms = round(timeout_s * 1e3)

    def put(self, stream: int, peers: Sequence[int], channel: int, generation: int) -> None:
        """Set the own counter of the channel at each of the peers, behind all earlier work."""
        with torch.cuda.stream(self._streams[stream]):
            for peer in peers:
                self._handle.put_signal(peer, channel, self._timeout_ms)

    def wait(self, stream: int, peers: Sequence[int], channel: int, generation: int) -> None:
        """Hold later work until the peers' counters of the channel are at the generation."""
        with torch.cuda.stream(self._streams[stream]):
            for peer in peers:
                self._handle.wait_signal(peer, channel, self._timeout_ms)


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
