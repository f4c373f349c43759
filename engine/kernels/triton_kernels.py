"""Kernels for GPUs without DeepGEMM: those of `HopperKernels`, by composition.

A GPU that does not know e4m3 (Ampere)
quantises with kernels that make its bits by hand.
"""

from typing import Protocol

import torch
from torch import Tensor

from engine.attention.kernels import AttentionKernels
from engine.attention.latent_storage import put_rows
from engine.formats.base import Formats
from engine.formats.fp8_rows import Fp8Rows
from engine.formats.triton_gemm import byte_quant
from engine.formats.triton_gemm.limits import DeviceLimits
from engine.kernels.fused import routing
from engine.kernels.hopper import HopperKernels
from engine.kernels.rotation import Rotation


class _Quantised(Protocol):
    """The operations that write e4m3 numbers; see `Kernels`."""

    def store_latents(
        self,
        latents_TL: Tensor,
        weight_C: Tensor,
        eps: float,
        rotation: Rotation,
        *,
        cache: Tensor,
        slots_T: Tensor,
    ) -> None: ...

    def split_latents(
        self,
        latents_TX: Tensor,
        q_weight_Q: Tensor,
        weight_C: Tensor,
        eps: float,
        rotation: Rotation,
        *,
        cache: Tensor,
        slots_T: Tensor,
    ) -> Fp8Rows: ...

    def add_rms_norm_fp8(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        weight_D: Tensor,
        eps: float,
        *,
        with_plain: bool,
        out: Fp8Rows | None = None,
    ) -> tuple[Tensor, Tensor | None, Fp8Rows]: ...

    def silu_and_mul_fp8(self, gate_up_TF: Tensor) -> Fp8Rows: ...


class TritonKernels:
    """See `Kernels`."""

    gate_logits = staticmethod(routing.score)

    def __init__(
        self,
        *,
        limits: DeviceLimits,
        formats: Formats,
        attention: AttentionKernels,
    ) -> None:
        """Take what the GPU can do, what multiplies, and what attends."""
        shared = HopperKernels(formats=formats, attention=attention)
        own: _Quantised = shared if limits.has_fp8 else _ByHand(shared)
        self.name = f"triton on sm{limits.sm}"
        self.formats, self.attention = formats, attention

        self.store_latents = own.store_latents
        self.split_latents = own.split_latents
        self.add_rms_norm_fp8 = own.add_rms_norm_fp8
        self.silu_and_mul_fp8 = own.silu_and_mul_fp8

        self.rms_norm = shared.rms_norm
        self.add_rms_norm = shared.add_rms_norm
        self.silu_and_mul = shared.silu_and_mul
        self.group_limited_topk = shared.group_limited_topk
        self.count_rows = shared.count_rows
        self.moe_align_block_size = shared.moe_align_block_size
        self.permute_rows = shared.permute_rows
        self.unpermute_rows = shared.unpermute_rows
        self.moe_align_masked = shared.moe_align_masked
        self.permute_masked_rows = shared.permute_masked_rows
        self.rotate_queries = shared.rotate_queries
        self.join_keys = shared.join_keys


class _ByHand:
    """What writes e4m3 numbers, on a GPU that does not know them."""

    def __init__(self, shared: HopperKernels) -> None:
        self._shared = shared

    silu_and_mul_fp8 = staticmethod(byte_quant.silu_and_mul_fp8)

    def store_latents(
        self,
        latents_TL: Tensor,
        weight_C: Tensor,
        eps: float,
        rotation: Rotation,
        *,
        cache: Tensor,
        slots_T: Tensor,
    ) -> None:
        if cache.dtype != torch.float8_e4m3fn:
            self._shared.store_latents(
                latents_TL, weight_C, eps, rotation, cache=cache, slots_T=slots_T
            )
            return
        # As rows of a block of their own, which PyTorch then rounds: it makes e4m3 by hand.
        rows_TL = torch.empty(latents_TL.shape, dtype=latents_TL.dtype, device=cache.device)
        places_T = torch.arange(len(rows_TL), device=cache.device)
        self._shared.store_latents(
            latents_TL, weight_C, eps, rotation, cache=rows_TL.unsqueeze(0), slots_T=places_T
        )
        put_rows(cache, slots_T, rows_TL)

    def split_latents(
        self,
        latents_TX: Tensor,
        q_weight_Q: Tensor,
        weight_C: Tensor,
        eps: float,
        rotation: Rotation,
        *,
        cache: Tensor,
        slots_T: Tensor,
    ) -> Fp8Rows:
        q_TQ, latents_TL = latents_TX.tensor_split([q_weight_Q.shape[0]], dim=1)
        self.store_latents(latents_TL, weight_C, eps, rotation, cache=cache, slots_T=slots_T)
        return byte_quant.quantize_rows(self._shared.rms_norm(q_TQ, q_weight_Q, eps))

    def add_rms_norm_fp8(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        weight_D: Tensor,
        eps: float,
        *,
        with_plain: bool,
        out: Fp8Rows | None = None,
    ) -> tuple[Tensor, Tensor | None, Fp8Rows]:
        if delta_TD is None:
            total, normed = x_TD, self._shared.rms_norm(x_TD, weight_D, eps)
        else:
            total, normed = self._shared.add_rms_norm(x_TD, delta_TD, weight_D, eps)
        return total, normed if with_plain else None, byte_quant.quantize_rows(normed, out)
