"""Memory that is used again and again within a process, so that the allocator is left alone.

Gathered latents are megabytes that live for microseconds. Fresh memory for each would be returned
to and faulted in from the operating system every time, which costs more than the gathering. One
scratch belongs to one model, and a model runs in one thread.
"""

import torch
from torch import Tensor


class Scratch:
    """A buffer that grows to the largest request and is handed out anew each time."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return uninitialised memory with the dtype and device of `like`.

        What an earlier call returned is overwritten: use one result before taking the next.
        """
        numel = 1
        for size in shape:
            numel *= size
        buffer = self._buffer
        fits = buffer is not None and buffer.dtype == like.dtype and buffer.device == like.device
        if buffer is None or not fits or buffer.numel() < numel:
            # A buffer born in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
            self._buffer = buffer
        return buffer[:numel].view(shape)
