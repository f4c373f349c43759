"""DeepGEMM on a tuned product's inputs, where it is installed: what the tiles are compared with."""

from __future__ import annotations

import logging
from collections.abc import Callable

from bench.tuner.bench import Flush, median_seconds
from bench.tuner.inputs import Inputs
from engine.formats import deep_gemm
from engine.formats.fp8_rows import Fp8Rows
from engine.formats.triton_gemm.tiles import ProductShape, RowLayout
from engine.kernels.masked_rows import MaskedRows

logger = logging.getLogger(__name__)


class Rival:
    """DeepGEMM, loaded."""

    def __init__(self, flush: Flush) -> None:
        self._gemm = deep_gemm.DeepGemm()
        self._flush = flush

    def tflops(self, shape: ProductShape, inputs: Inputs) -> float | None:
        """Return what it reaches; None where it refuses the shape. Compiles at first."""
        call = self._call(shape, inputs)
        try:
            call()
        except RuntimeError as error:
            logger.info("deep_gemm does not take shape=%s error=%s", shape, error)
            return None
        return inputs.operations / median_seconds(call, self._flush, float("inf")) * 1e-12

    def _call(self, shape: ProductShape, inputs: Inputs) -> Callable[[], object]:
        job, gemm = inputs.job, self._gemm
        (data, scale), (weight, weight_scale) = job.rows, job.weight
        if shape.layout is RowLayout.MASKED:
            masked = MaskedRows(
                data_LMD=data,
                scale_LMG=scale,
                num_rows_L=job.experts,
                expected_rows=shape.num_rows,
            )
            return lambda: gemm.masked_linear(masked, weight, weight_scale)
        rows = Fp8Rows(data_TK=data[0], scale_TG=scale[0]).column_major()
        if shape.layout is RowLayout.ALIGNED:
            return lambda: gemm.grouped_linear(rows, job.experts, weight, weight_scale)
        return lambda: gemm.linear(rows, weight[0], weight_scale[0])


def load_rival(flush: Flush) -> Rival | None:
    """Return it where it is installed and this GPU is one of its kind."""
    return Rival(flush) if deep_gemm.is_available() else None
