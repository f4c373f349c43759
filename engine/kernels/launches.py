"""How the kernels of a decode step are launched: each behind the one before, or half beside it.

No result depends on it. What dependent launches are, and why they are safe, says
`engine.kernels.fused.dependent`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, TypeAlias

import torch

from engine.formats import deep_gemm
from engine.kernels.fused import dependent

SIDE_MULTIPROCESSORS: Final = 100
"""Of a Hopper GPU's 132, for products of a second stream; from 68 to 132 a layer takes as long."""

Launches: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Makes a block; kernels that this thread launches in it are launched so."""


def choose_launches(device: torch.device, *, are_dependent: bool) -> Launches:
    """Return dependent launches where they are asked for on a Hopper GPU, else ordinary ones."""
    if are_dependent and device.type == "cuda" and deep_gemm.is_available():
        return dependent_launches
    return nullcontext


def choose_side_launches(device: torch.device) -> Launches:
    """Return ordinary launches that leave a part of the GPU to the kernels of another stream."""
    if device.type == "cuda" and deep_gemm.is_available():
        return side_launches
    return nullcontext


@contextmanager
def side_launches() -> Iterator[None]:
    """Launch ours and the matrix library's kernels as usual, the latter's on part of the GPU."""
    with deep_gemm.on_few_multiprocessors(SIDE_MULTIPROCESSORS), dependent.ordinary_launches():
        yield


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Launch our kernels and the matrix library's as dependent ones; all others come as always."""
    with deep_gemm.dependent_launches(), dependent.dependent_launches():
        yield
