"""Why a capture failed: the step does what no graph holds, there is no memory, or the device broke.

The three end differently. A step that no graph holds can run without one, so that is an answer
about the model (`CaptureError`), and one that the ranks of a group have to give alike: else some
replay and the others do not, and nobody says so. Memory and everything else that a device reports
are no answer about the model: who falls back then is several times slower for good, because of a
number in a configuration. CUDA tells the kinds apart by name, and PyTorch, Triton and the libraries
below pass the name on in the message; some of them have no type for it.
"""

from typing import Final

import torch

from engine.parallel.groups import RankGroup

# What `cudaGetErrorString` says of errors 900 to 908, all of which are about capturing.
_FORBIDDEN: Final = (
    "operation not permitted when stream is capturing",
    "operation failed due to a previous error during capture",
    "operation would result in a merge of separate capture sequences",
    "capture was not ended in the same stream as it began",
    "capturing stream has unjoined work",
    "dependency created on uncaptured work in another stream",
    "operation would make the legacy stream depend on a capturing blocking stream",
    "operation not permitted on an event last recorded in a capturing stream",
    "attempt to terminate a thread-local capture sequence from another thread",
    "during cuda graph capture",  # PyTorch's own checks, which come before the driver's
)
_NO_MEMORY: Final = ("out of memory", "alloc_failed", "memory allocation failure")
_OF_A_DEVICE: Final = ("cuda error", "[cuda]", "cublas_status", "cudnn_status", "nccl")


class CaptureError(RuntimeError):
    """The model's step cannot be captured: something in it reads the device."""


def is_forbidden(error: RuntimeError) -> bool:
    """Return whether the step did something that a graph cannot hold."""
    return isinstance(error, CaptureError) or _says(error, _FORBIDDEN)


def is_no_memory(error: RuntimeError) -> bool:
    """Return whether the device had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or _says(error, _NO_MEMORY)


def is_of_a_device(error: RuntimeError) -> bool:
    """Return whether a device, or a library on it, reports the error; for whatever reason."""
    return is_no_memory(error) or _says(error, _OF_A_DEVICE)


def first_line(error: BaseException) -> str:
    """Return what is wrong, without the advice that PyTorch adds."""
    return str(error).partition("\n")[0]


def agree_on_capture(group: RankGroup, error: RuntimeError | None) -> None:
    """Raise on all ranks alike if one of them could not capture; every rank calls.

    Only a forbidden operation can be agreed on. A rank that fails for another reason may have left
    the others in the middle of a step that they wait for it in: it raises at once, ends, and its
    peers find it gone, here or in that step.

    Args:
        group: of all ranks that capture together; its collectives take host memory.
        error: what this rank's capture ended with, if it did.

    Raises:
        CaptureError: a rank's step cannot be captured; the message says whose, and why if it is
            this one's.
        RuntimeError: `error`, if it is of another kind.
        PeerLostError: another rank ended.
    """
    if error is not None and not is_forbidden(error):
        raise error
    outcomes = group.all_gather(torch.tensor([int(error is not None)], dtype=torch.int64))
    refusing = outcomes.nonzero().flatten().tolist()
    if error is not None:
        raise CaptureError(first_line(error)) from error
    if refusing:
        raise CaptureError(f"the step of rank {refusing[0]} cannot be captured; its log says why")


def _says(error: RuntimeError, phrases: tuple[str, ...]) -> bool:
    message = str(error).lower()
    return any(phrase in message for phrase in phrases)
