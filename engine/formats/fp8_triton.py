"""Which products in FP8 a set of kernels has; needs Triton, and DeepGEMM for Hopper's.

A GPU that lacks the number format (Ampere) also quantises with kernels that make its bits by hand;
its products widen them (see `triton_gemm.product`).
"""

import importlib
from typing import Final

import torch

from engine.formats import deep_gemm
from engine.formats.expert_stream.mlp import ExpertStream
from engine.formats.expert_stream.tiles import MEASURED
from engine.formats.fp8_products import GemmProducts, Quantizers
from engine.formats.triton_gemm import byte_quant
from engine.formats.triton_gemm.gemm import TritonGemm
from engine.formats.triton_gemm.limits import DeviceLimits
from engine.formats.triton_gemm.overflow import OverflowExperts
from engine.formats.triton_gemm.tables import find_table
from engine.kernels.fused import quant
from engine.ops import activation_kernel, masked_kernel

IN_HARDWARE: Final = Quantizers(
    rows=quant.quantize_rows,
    activate=activation_kernel.silu_and_mul_fp8,
    activate_masked=masked_kernel.masked_silu_and_mul_fp8,
)

BY_HAND: Final = Quantizers(
    rows=byte_quant.quantize_rows,
    activate=byte_quant.silu_and_mul_fp8,
    activate_masked=byte_quant.masked_silu_and_mul_fp8,
)


def hopper(device: torch.device) -> GemmProducts:
    """Return products by DeepGEMM, and our own over few rows and behind the capacity."""
    limits = DeviceLimits.of(device)
    return GemmProducts(
        gemm=deep_gemm.DeepGemm(),
        quantizers=IN_HARDWARE,
        overflow=OverflowExperts(limits),
        experts=ExpertStream(MEASURED, limits.num_sms),
    )


def triton(device: torch.device) -> GemmProducts:
    """Return our own products, with the tiles that were measured on this GPU."""
    version: str = importlib.import_module("triton").__version__
    table = find_table(torch.cuda.get_device_name(device), version)
    return of_gemm(TritonGemm(DeviceLimits.of(device), table))


def of_gemm(gemm: TritonGemm) -> GemmProducts:
    """Return our own products, for the GPU that the GEMMs are for."""
    quantizers = BY_HAND if gemm.widens else IN_HARDWARE
    return GemmProducts(gemm=gemm, quantizers=quantizers, overflow=OverflowExperts(gemm.limits))
