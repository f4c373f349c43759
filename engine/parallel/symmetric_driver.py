"""Copies and signals that a GPU's front end does by itself: the CUDA driver's part of symmetric memory.

A copy to or from a peer's memory runs on a copy engine; a wait and a put are operations of the
stream. None of them needs a multiprocessor, which a persistent matrix product would not give
before it ends. `torch` offers no wait on a value, hence the driver's own library through ctypes;
it is part of every CUDA installation. The order that signals make is not known to CUDA: see
`symmetric_schedule` for why it cannot deadlock.
"""

import ctypes
from collections.abc import Sequence
from typing import Final, Protocol

import torch

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_WAIT_GEQ, _WRITE_DEFAULT = 0, 0
"""Wait until (int32)(*address - value) >= 0; write behind a fence for all earlier writes."""


class SignalDevice(Protocol):
    """Launches copies and signals on streams; `stream` is always an index into its streams."""

    def copy(self, stream: int, destination: int, source: int, nbytes: int) -> None:
        """Copy between addresses of this GPU or its peers."""
        ...

    def put(self, stream: int, peers: Sequence[int], channel: int, generation: int) -> None:
        """Set the own counter of the channel at each of the peers, behind all earlier work."""
        ...

    def wait(self, stream: int, peers: Sequence[int], channel: int, generation: int) -> None:
        """Hold later work until the peers' counters of the channel are at the generation."""
        ...


class _StreamOperation(ctypes.Structure):
    """`CUstreamBatchMemOpParams`, whose two variants that are used here have the same fields."""

    _fields_: Final = [
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
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._handles = [ctypes.c_void_p(stream.cuda_stream) for stream in streams]
        self._own_counters = own_counters
        self._peer_counters = peer_counters

    def copy(self, stream: int, destination: int, source: int, nbytes: int) -> None:
        """Copy between addresses of this GPU or its peers."""
        self._call(
            "cuMemcpyAsync",
            ctypes.c_uint64(destination),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            self._handles[stream],
        )

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
            *((operation, address, value, flags) for address in addresses)
        )
        self._call(
            "cuStreamBatchMemOp_v2",
            self._handles[stream],
            ctypes.c_uint(len(addresses)),
            operations,
            ctypes.c_uint(0),
        )

    def _call(self, name: str, *arguments: object) -> None:
        """Call the driver.

        Raises:
            RuntimeError: with the driver's name of its error.
        """
        status = getattr(self._driver, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
            reason = (text.value or b"unknown").decode()
            raise RuntimeError(f"the CUDA driver failed in {name}: {reason} ({status})")


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
        driver: DriverSignals,
        handle: SymmetricHandle,
        *,
        timeout_s: float = 60.0,
    ) -> None:
        self._streams = streams
        self._driver = driver
        self._handle = handle
        self._timeout_ms = round(timeout_s * 1e3)

    def copy(self, stream: int, destination: int, source: int, nbytes: int) -> None:
        """Copy between addresses of this GPU or its peers."""
        self._driver.copy(stream, destination, source, nbytes)

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
