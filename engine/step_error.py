"""A step that failed alone: its rank and its device are as they were, and other steps follow.

Whoever runs a step says where it may fail so (`may_fail`). What leaves the device or the group in
doubt is never called that, and ends the rank (`reason_of_end`): an error of the device, a lost
peer, and anything between two collectives, where the other ranks wait for this one in the middle of
the same step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import DistError

from engine.parallel.lost_peer import as_lost_peer
from runtime.errors import DeviceError, InternalError, PeerLostError, TandemError

_OF_DEVICES = ("CUDA error", "CUDA driver error", "[CUDA]", "CUBLAS_STATUS", "NCCL", "cuDNN error")
"""An error of a device stays: every later call on it fails too, or computes nobody knows what."""


class StepError(InternalError):
    """A step gave nothing, and its rank goes on.

    `request_id` is that of the one request at fault, where it is known.

    Attributes:
        has_joined: other ranks, if there are any, do not wait for this one: it has taken its part
            in the collectives of the step. If not, nothing has run, and it still has to.
    """

    def __init__(self, message: str, *, request_id: str = "", has_joined: bool) -> None:
        super().__init__(message, request_id=request_id)
        self.has_joined = has_joined

    def ends(self, request_id: str) -> bool:
        """Whether this request of the step has to end: all of them, or the one that was at fault
        before anything ran.
        """
        return self.has_joined or self.request_id in ("", request_id)

    def answer(self, request_id: str) -> InternalError:
        """What this request is told: it may be why, unless it is known to be."""
        text = f"its step failed: {self.message}"
        return InternalError(text, request_id=request_id, suspect=self.request_id != request_id)


@contextmanager
def may_fail(device: torch.device, *, has_joined: bool) -> Iterator[None]:
    """What is raised within is the failure of a step alone, unless it leaves the device in doubt.

    Args:
        device: of the step; what was issued to it is over before the step is given up, so that
            nothing that is dropped here is still in use.
        has_joined: see `StepError`.

    Raises:
        StepError: the step failed.
        Exception: what was raised, where the rank has to end.
    """
    try:
        yield
    except StepError:
        raise
    except Exception as error:
        if leaves_doubt(error):
            raise
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        text, request_id = f"{type(error).__name__}: {error}", ""
        if isinstance(error, TandemError):
            text, request_id = error.message, error.request_id
        raise StepError(text, request_id=request_id, has_joined=has_joined) from error


@contextmanager
def as_raised() -> Iterator[None]:
    """Raise what made a step fail as it was: where no rank serves yet, nobody goes on behind it."""
    try:
        yield
    except StepError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def leaves_doubt(error: Exception) -> bool:
    """Return whether a device or a group may be lost for good; without memory it is not."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, (DistError, torch.AcceleratorError)) or as_lost_peer(error) is not None:
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_DEVICES)


def reason_of_end(error: BaseException, *, in_group: bool) -> TandemError:
    """Return why an engine loop ends, from what was raised in it.

    Args:
        error: of a step, of the meeting before it, or of anything between two steps.
        in_group: the rank's steps wait for other ranks.
    """
    lost = as_lost_peer(error) if in_group or isinstance(error, PeerLostError) else None
    if lost is not None:
        return lost
    is_of_device = isinstance(error, Exception) and leaves_doubt(error)
    kind = DeviceError if is_of_device else InternalError
    return kind(f"{type(error).__name__}: {error}")
