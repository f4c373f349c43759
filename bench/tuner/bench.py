"""Compiles, checks and times tiles of one product on the GPU.

Between two launches the cache is overwritten, so that weights come from memory as they do when
another layer ran before; that work also hides the time in which Python prepares the launch. A tile
counts only if its result is right.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from bench.tuner.inputs import Inputs
from engine.formats.triton_gemm.tiles import TileConfig

TOLERANCE = 1e-2
"""Relative error of the sampled rows: bfloat16 results, sums in another order."""

HOPELESS = 1.3
"""A tile whose first launch takes this many times the best median is not launched again."""

REPEATS = (5, 15)
"""Launches of a tile, at least and at most; in between as many as fit in `TIMING_S`."""

TIMING_S = 0.01

FLUSH_BYTES = 512 << 20
"""Larger than any cache, and long enough to overwrite that the next launch is ready by then."""

logger = logging.getLogger(__name__)


class Flush:
    """Overwrites the GPU's cache."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        """Do so, without waiting."""
        self._buffer.zero_()


def median_seconds(call: Callable[[], object], flush: Flush, bound_s: float) -> float:
    """Return the median device time of a call; of one launch if that is far above the bound."""
    first = _times(call, flush, 1)[0]
    if first > HOPELESS * bound_s:
        return first
    repeats = min(max(int(TIMING_S / max(first, 1e-6)), REPEATS[0]), REPEATS[1])
    return statistics.median(_times(call, flush, repeats))


def _times(call: Callable[[], object], flush: Flush, repeats: int) -> list[float]:
    events = []
    for _ in range(repeats):
        flush()
        pair = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        pair[0].record()
        call()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    return [float(first.elapsed_time(last)) / 1e3 for first, last in events]


class GpuBench:
    """See `bench.tuner.search.Bench`."""

    def __init__(self, inputs: Inputs, flush: Flush, *, widen: bool, jobs: int) -> None:
        """Take the operands, and how many tiles may be compiled at once."""
        self._inputs = inputs
        self._flush = flush
        self._widen = widen
        self._jobs = jobs

    def compile(self, tiles: Sequence[TileConfig]) -> None:
        """See `Bench`."""
        mode = getattr(triton, "AsyncCompileMode", None)
        if mode is None or self._jobs == 1:
            return  # each is compiled at its first launch
        with ThreadPoolExecutor(self._jobs) as pool, mode(pool, ignore_errors=True):
            for tile in tiles:
                try:
                    self._inputs.job.compile(tile, widen=self._widen)
                except TritonError as error:
                    logger.debug("does not compile tile=%s error=%r", tile, error)

    def seconds(self, tile: TileConfig, bound_s: float) -> float | None:
        """See `Bench`."""
        job = self._inputs.job
        job.out.view(torch.uint8).fill_(0xFF)  # NaN
        try:
            job.launch(tile, widen=self._widen)
            error = self._error(job.out)
        except torch.AcceleratorError:
            raise  # the device is not to be used any more
        except (TritonError, RuntimeError) as failure:
            logger.info("skipped a tile that does not run tile=%s error=%r", tile, failure)
            return None
        if not error < TOLERANCE:
            logger.error("skipped a tile that computes something else tile=%s off=%s", tile, error)
            return None
        return median_seconds(lambda: job.launch(tile, widen=self._widen), self._flush, bound_s)

    def _error(self, out: Tensor) -> float:
        """Return the largest relative error of a sample; NaN if anything there is NaN."""
        flat = out.flatten(0, 1)
        errors = []
        for sample in self._inputs.samples:
            expected = sample.expected.float()
            difference = flat[sample.rows].float() - expected
            errors.append(difference.norm() / expected.norm())
        return float(torch.stack(errors).max())
