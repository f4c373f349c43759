"""The number formats there are, beside the plain one: a line here and a file for each."""

from collections.abc import Callable
from typing import Final

import torch

from engine.formats import fp8_block
from engine.formats.base import Formats, NumberFormat
from engine.formats.plain import PLAIN
from engine.kernels.base import KernelSet

Create = Callable[[KernelSet, torch.device], NumberFormat | None]
"""Makes a format on a device, with a set of kernels; None if the set does not multiply in it."""

FORMATS: Final[tuple[Create, ...]] = (fp8_block.create,)
"""The best first."""


def create_formats(kernels: KernelSet, device: torch.device) -> Formats:
    """Return the formats that a set of kernels multiplies in, on a device."""
    created = (create(kernels, device) for create in FORMATS)
    return Formats(plain=PLAIN, quantized=tuple(one for one in created if one is not None))
