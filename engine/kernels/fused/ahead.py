"""What a Hopper GPU can begin early; see `engine.kernels.ahead`."""

from collections.abc import Iterator
from contextlib import contextmanager

from engine.kernels import deep_gemm
from engine.kernels.fused.dependent import dependent_launches
from engine.kernels.fused.prefetch import prefetch
from engine.kernels.weight_chunks import WeightChunks


class HopperAhead:
    """See `AheadKernels`."""

    @contextmanager
    def dependent_launches(self) -> Iterator[None]:
        """Ours and the matrix library's kernels; all others come as always."""
        with deep_gemm.dependent_launches(), dependent_launches():
            yield

    def prefetch(self, chunks: WeightChunks) -> None:
        """See `AheadKernels`."""
        prefetch(chunks)
