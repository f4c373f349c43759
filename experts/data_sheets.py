"""What the GPU that is there could do at most, by its own name; nothing for one that is not listed.

The key idea: a share of a bound means something only beside the bound of the chip that ran, so a
name is looked up whole. A part of a GPU, or a model of the same family, has another name and gets
no share.

Rates are dense ones (a data sheet's tensor figures with sparsity, halved) and one direction of a
link (half of the sum that data sheets give). A chip without FP8 multiplies widened numbers, so its
products run at bfloat16's rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Rates of one GPU.

    Attributes:
        name: for reports.
        fp8: operations per second of dense products in FP8.
        attention: operations per second of attention in bfloat16.
        memory: bytes per second.
        link: bytes per second that the GPU sends to others of its host.
    """

    name: str
    fp8: float
    attention: float
    memory: float
    link: float


H200: Final = Hardware(
    name="H200 data sheet", fp8=1979e12, attention=989e12, memory=4.8e12, link=450e9
)
H200_REACHED: Final = Hardware(
    name="H200 as reached by published kernels",
    fp8=0.7 * 1979e12,
    attention=660e12,
    memory=4.3e12,
    link=390e9,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """The rates of one GPU and where they stand.

    Attributes:
        rates: of the data sheet: none has been passed.
        source: the document.
        reached: rates that published kernels have reached; None where nobody has collected them.
    """

    rates: Hardware
    source: str
    reached: Hardware | None = None

    @property
    def by_name(self) -> Mapping[str, Hardware]:
        """Rates to compute bounds with."""
        reached = {"reached": self.reached} if self.reached is not None else {}
        return {"data_sheet": self.rates, **reached}


def _sheet(name: str, source: str, *rates: float) -> DataSheet:
    """``rates``: TFLOP/s in FP8 and in bfloat16, GB/s of memory and of the link."""
    fp8, attention, memory, link = rates
    return DataSheet(
        rates=Hardware(
            name=f"{name} data sheet",
            fp8=fp8 * 1e12,
            attention=attention * 1e12,
            memory=memory * 1e9,
            link=link * 1e9,
        ),
        source=source,
    )


_H100 = "NVIDIA H100 Tensor Core GPU data sheet"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
SHEETS: Final[Mapping[str, DataSheet]] = MappingProxyType(
    {
        "NVIDIA H200": DataSheet(
            rates=H200, source="NVIDIA H200 Tensor Core GPU data sheet, SXM", reached=H200_REACHED
        ),
        "NVIDIA H100 80GB HBM3": _sheet("H100 SXM", f"{_H100}, SXM", 1979, 989, 3350, 450),
        "NVIDIA H100 PCIe": _sheet("H100 PCIe", f"{_H100}, PCIe", 1513, 756, 2000, 300),
        "NVIDIA A100-SXM4-80GB": _sheet("A100 SXM 80 GB", f"{_A100}, SXM", 312, 312, 2039, 300),
        "NVIDIA A100-SXM4-40GB": _sheet("A100 SXM 40 GB", f"{_A100}, SXM", 312, 312, 1555, 300),
        "NVIDIA A100 80GB PCIe": _sheet("A100 PCIe 80 GB", f"{_A100}, PCIe", 312, 312, 1935, 300),
        "NVIDIA L40S": _sheet("L40S", "NVIDIA L40S data sheet", 733, 362.05, 864, 32),
        "NVIDIA L40": _sheet("L40", "NVIDIA L40 data sheet", 362, 181.05, 864, 32),
    }
)
"""By the name that the driver gives the device."""


def find_sheet(device_name: str) -> DataSheet | None:
    """The data sheet of the device of that name; None where we have none."""
    return SHEETS.get(device_name)


def describe_sheet(device_name: str) -> dict[str, str | None]:
    """For a report: what shares are shares of, or why there are none."""
    sheet = find_sheet(device_name)
    if sheet is None:
        return {"device": device_name, "source": None, "why": f"no data sheet for {device_name}"}
    return {"device": device_name, "source": sheet.source, "why": None}
