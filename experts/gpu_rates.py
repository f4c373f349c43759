"""What a device reaches of its data sheet: the rates that time is modelled by.

Of an H200 it is what published kernels reach (70 % of the data sheet's FP8 rate, 660 of 989 TFLOP/s
in bfloat16, 4.3 of 4.8 TB/s, 390 of 450 GB/s a direction); of another GPU the same shares of its
own data sheet. Between hosts it is 95 % of one 400 Gbit/s NIC for each GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from experts.data_sheets import H200 as H200_SHEET
from experts.data_sheets import H200_REACHED, Hardware, find_sheet

_NETWORK: Final = 0.95 * 50e9


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRates:
    """What one GPU reaches, not what its data sheet promises.

    Attributes:
        name: for reports.
        flops: operations per second of GEMMs of experts in FP8.
        wide_flops: the same of experts in wider numbers.
        memory: bytes per second.
        link: bytes per second, one direction, to GPUs of its host.
        network: bytes per second, one direction, to other hosts.
    """

    name: str
    flops: float
    wide_flops: float
    memory: float
    link: float
    network: float


def _reached(name: str, rates: Hardware) -> GpuRates:
    return GpuRates(
        name=name,
        flops=rates.fp8,
        wide_flops=rates.attention,
        memory=rates.memory,
        link=rates.link,
        network=_NETWORK,
    )


H200: Final = _reached("NVIDIA H200", H200_REACHED)
CPU: Final = GpuRates(name="CPU", flops=50e9, wide_flops=50e9, memory=20e9, link=5e9, network=1e9)
"""The order of magnitude of a core: experts of more than a few rows compute."""


def rates_of_device(name: str) -> GpuRates | None:
    """The rates of a device; None for a GPU of which we have no data sheet.

    Args:
        name: that the driver gives a GPU, or "CPU".
    """
    if name == CPU.name:
        return CPU
    sheet = find_sheet(name)
    if sheet is None:
        return None
    if sheet.reached is not None:
        return _reached(name, sheet.reached)
    own, like, reached = sheet.rates, H200_SHEET, H200_REACHED
    return _reached(
        name,
        Hardware(
            name=name,
            fp8=own.fp8 * reached.fp8 / like.fp8,
            attention=own.attention * reached.attention / like.attention,
            memory=own.memory * reached.memory / like.memory,
            link=own.link * reached.link / like.link,
        ),
    )
