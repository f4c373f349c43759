"""Plain PyTorch as kernels: CPUs, and any device without faster ones."""

from engine.attention.reference_kernels import ReferenceAttention
from engine.formats.base import Formats
from engine.formats.fp8_block import Fp8Block
from engine.formats.fp8_products import ReferenceProducts
from engine.formats.plain import PLAIN
from engine.kernels.base import Kernels
from engine.ops.op import Target
from engine.ops.table import resolve_ops


def portable_kernels(
    *,
    has_fp8: bool = False,
    has_paged_attention: bool = False,
    formats: Formats | None = None,
) -> Kernels:
    """Return the references.

    Args:
        has_fp8: multiply in FP8, so that tests can run that path anywhere; normally weights are
            dequantised at load, which is faster without hardware.
        has_paged_attention: attend by block tables; in groups of sequences it is faster on a CPU.
        formats: instead of these.
    """
    fp8 = (Fp8Block(ReferenceProducts()),) if has_fp8 else ()
    return Kernels(
        name="portable",
        formats=formats or Formats(plain=PLAIN, quantized=fp8),
        attention=ReferenceAttention(reads_pages=has_paged_attention),
        ops=resolve_ops(Target.PORTABLE),
    )
