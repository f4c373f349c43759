"""What a GPU can hold and multiply, as far as the choice of tiles depends on it."""

from dataclasses import dataclass
from typing import Final

import torch

RESERVED_SHARED_MEMORY: Final = 1024
"""Bytes of an SM's shared memory that CUDA keeps for each program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """One kind of GPU.

    Attributes:
        sm: compute capability, major * 10 + minor.
        shared_memory: bytes that one program may use; at least 48 KiB on every GPU.
        num_sms: SMs.
    """

    sm: int
    shared_memory: int
    num_sms: int

    @property
    def has_fp8(self) -> bool:
        """Whether the tensor cores multiply e4m3 numbers (Ada and later)."""
        return self.sm >= 89

    @property
    def reads_shared_memory(self) -> bool:
        """Whether tensor cores read operands from shared memory (data-centre Hopper, Blackwell)."""
        return 90 <= self.sm < 120

    @classmethod
    def of(cls, device: torch.device | str) -> "DeviceLimits":
        """Read them off a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        return cls(
            sm=properties.major * 10 + properties.minor,
            shared_memory=properties.shared_memory_per_multiprocessor - RESERVED_SHARED_MEMORY,
            num_sms=properties.multi_processor_count,
        )


AMPERE: Final = DeviceLimits(sm=80, shared_memory=163 * 1024, num_sms=108)
"""A100: no FP8 tensor cores."""

ADA: Final = DeviceLimits(sm=89, shared_memory=99 * 1024, num_sms=142)
"""L40S: FP8 tensor cores, little shared memory."""

HOPPER: Final = DeviceLimits(sm=90, shared_memory=227 * 1024, num_sms=132)
"""H100, H200."""
