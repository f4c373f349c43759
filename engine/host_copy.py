"""Small arrays to the device and small results back, without making the host wait.

A copy from or to ordinary memory stops the host until the stream has come to it, and then nothing
can be launched ahead of a running step. So both ways go through pinned memory. It comes from
PyTorch's cache of such memory, which records an event behind every copy and hands a piece out again
only after that event; nobody here has to remember what is still in flight. On a CPU nothing is
copied: arrays and tensors share their memory.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.generic]

_ALIGNMENT = 16  # bytes; every array begins at a multiple, so that its view is legal and vectorised


def upload(arrays: Sequence[Array], device: torch.device | str) -> list[Tensor]:
    """Return the arrays as tensors on `device`, moved there by one copy that nobody waits for.

    Args:
        arrays: numeric; not to be changed afterwards (a CPU tensor shares their memory).
        device: where the tensors are to be. The copy is issued to its current stream.
    """
    if torch.device(device).type != "cuda":
        return [torch.from_numpy(array) for array in arrays]
    packed = pack(arrays, pinned=True).to(device, non_blocking=True)
    return unpack(packed, arrays)


def host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory from which a copy to `device` makes nobody wait; its values are any."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def pack(arrays: Sequence[Array], *, pinned: bool = False) -> Tensor:
    """Return the bytes of all arrays one after another, each aligned, as host memory [n] uint8."""
    packed = torch.empty(_places(arrays)[-1], dtype=torch.uint8, pin_memory=pinned)
    target = packed.numpy()
    for array, start in zip(arrays, _places(arrays), strict=False):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target[start : start + flat.size] = flat
    return packed


def unpack(packed: Tensor, arrays: Sequence[Array]) -> list[Tensor]:
    """Return views of `packed`, wherever it is, with the shapes and types of `arrays`."""
    views = []
    for array, start in zip(arrays, _places(arrays), strict=False):
        piece = packed[start : start + array.nbytes]
        views.append(piece.view(_torch_dtype(array.dtype)).view(array.shape))
    return views


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return what PyTorch calls a type; asking it takes longer than all else of a view."""
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype


def _places(arrays: Sequence[Array]) -> list[int]:
    """Return where each array begins and, last, where the whole ends; bytes."""
    places = [0]
    for array in arrays:
        places.append(places[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return places


class HostCopies:
    """The results of one step on their way to the host: `add` each, `close`, then `wait` and read.

    On a CPU every result is there at once, and the others do nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._near: torch.cuda.Event | None = None
        self._end: torch.cuda.Event | None = None
        if device.type == "cuda":
            # Blocking: the thread that waits sleeps, and leaves its core to the others.
            self._end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def nearly_there(self) -> None:
        """Say that what is issued from here on takes about a millisecond.

        Whoever waits is woken now, which takes some 0.3 ms where it is a virtual machine's, and
        looks for the end without sleeping again.
        """
        if self._end is not None:
            self._near, self._end = self._end, torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._near.record()

    def add(self, result: Tensor) -> Tensor:
        """Return host memory that holds `result` after `wait`."""
        if self._end is None:
            return result
        host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        return host.copy_(result, non_blocking=True)

    def close(self) -> None:
        """Nothing more will be added."""
        if self._end is not None:
            self._end.record()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._end is None or bool(self._end.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block until everything is here."""
        if self._near is not None:
            self._near.synchronize()
        if self._end is not None:
            self._end.synchronize()
