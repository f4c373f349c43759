"""The reference operations as a set of kernels: CPUs, and any device without faster ones."""

import torch.nn.functional as F
from torch import Tensor

from engine.attention import absorb_reference
from engine.attention.reference_kernels import ReferenceAttention
from engine.formats.base import Formats
from engine.formats.fp8_block import Fp8Block
from engine.formats.fp8_products import ReferenceProducts
from engine.formats.fp8_rows import Fp8Rows
from engine.formats.plain import PLAIN
from engine.kernels import aligned_reference, masked_reference, reference


class PortableKernels:
    """See `Kernels`; FP8 operations exist so that tests can run the FP8 path anywhere.

    Attributes:
        formats: normally the plain one alone: weights are dequantised at load, which is faster
            without hardware.
        attention: normally not by block tables.
    """

    name = "portable"

    def __init__(
        self,
        *,
        has_fp8: bool = False,
        has_paged_attention: bool = False,
        formats: Formats | None = None,
    ) -> None:
        fp8 = (Fp8Block(ReferenceProducts()),) if has_fp8 else ()
        self.formats = formats or Formats(plain=PLAIN, quantized=fp8)
        self.attention = ReferenceAttention(reads_pages=has_paged_attention)

    rms_norm = staticmethod(reference.rms_norm)
    silu_and_mul = staticmethod(reference.silu_and_mul)
    add_rms_norm_fp8 = staticmethod(reference.add_rms_norm_fp8)
    group_limited_topk = staticmethod(reference.group_limited_topk)
    count_rows = staticmethod(aligned_reference.count_rows)
    moe_align_block_size = staticmethod(aligned_reference.moe_align_block_size)
    permute_rows = staticmethod(aligned_reference.permute_rows)
    unpermute_rows = staticmethod(aligned_reference.unpermute_rows)
    rotate_queries = staticmethod(reference.rotate_queries)
    store_latents = staticmethod(reference.store_latents)
    join_keys = staticmethod(reference.join_keys)
    split_latents = staticmethod(absorb_reference.split_latents)
    moe_align_masked = staticmethod(masked_reference.moe_align_masked)
    permute_masked_rows = staticmethod(masked_reference.permute_masked_rows)

    def add_rms_norm(
        self, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        total_TD = x_TD + delta_TD
        return total_TD, reference.rms_norm(total_TD, weight_D, eps)

    def silu_and_mul_fp8(self, gate_up_TF: Tensor) -> Fp8Rows:
        """See `Kernels`."""
        return reference.quantize_rows(reference.silu_and_mul(gate_up_TF.float()))

    def gate_logits(self, hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """See `Kernels`."""
        return F.linear(hidden_TD.float(), weight_ED.float())
