"""Tunes a list of products on this GPU, one after the other, within a limit of time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton

from bench.tuner.bench import Flush, GpuBench
from bench.tuner.inputs import Inputs, draw_inputs
from bench.tuner.rival import Rival, load_rival
from bench.tuner.search import Found, TimeLimit, find_best
from engine.formats.triton_gemm.candidates import candidates
from engine.formats.triton_gemm.limits import DeviceLimits
from engine.formats.triton_gemm.tables import TunedEntry, TunedTable, file_name, table_to_extend
from engine.formats.triton_gemm.tiles import ProductShape

RIVAL_SHARE = 0.25
"""Of the time, at most, for DeepGEMM, which compiles each shape at first."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rivalry:
    """DeepGEMM, while there is time for it."""

    rival: Rival | None
    seconds_left: float

    def tflops(self, shape: ProductShape, inputs: Inputs) -> float | None:
        if self.rival is None or self.seconds_left <= 0:
            return None
        start = time.monotonic()
        try:
            return self.rival.tflops(shape, inputs)
        finally:
            self.seconds_left -= time.monotonic() - start


@dataclass(slots=True)
class Tuner:
    """One GPU.

    Attributes:
        device: a CUDA device.
        jobs: tiles that are compiled at once.
        limits: of the device.
    """

    device: torch.device
    jobs: int
    limits: DeviceLimits = field(init=False)

    def __post_init__(self) -> None:
        self.limits = DeviceLimits.of(self.device)

    def tune(
        self, shapes: Sequence[ProductShape], budget_s: float
    ) -> Iterator[tuple[ProductShape, TunedEntry | None]]:
        """Yield the best tile found for each shape; None where no tile runs.

        Args:
            shapes: in the order in which they are tuned.
            budget_s: seconds; every shape has one tile timed even when they are over.
        """
        flush = Flush(self.device)
        rivalry = _Rivalry(load_rival(flush), budget_s * RIVAL_SHARE)
        limit = TimeLimit(budget_s, len(shapes))
        for shape in shapes:
            try:
                yield shape, self._tune_one(shape, limit.next_part(), flush, rivalry)
            except torch.OutOfMemoryError:
                logger.warning("too large for this GPU's memory shape=%s", shape)
                yield shape, None

    def _tune_one(
        self,
        shape: ProductShape,
        is_over: Callable[[], bool],
        flush: Flush,
        rivalry: _Rivalry,
    ) -> TunedEntry | None:
        inputs = draw_inputs(shape, self.device)
        tiles = candidates(shape, self.limits)
        bench = GpuBench(inputs, flush, widen=not self.limits.has_fp8, jobs=self.jobs)
        found = find_best(bench, tiles, is_over, at_once=2 * self.jobs)
        if found is None:
            logger.error("no tile runs shape=%s candidates=%d", shape, len(tiles))
            return None
        return _entry(shape, found, len(tiles), inputs, rivalry.tflops(shape, inputs))

    def table(self, folder: Path) -> TunedTable:
        """Return the device's table in the folder, to be added to, or an empty one.

        Raises:
            ConfigError: the file is there and is no such table.
        """
        name, version = torch.cuda.get_device_name(self.device), str(triton.__version__)
        empty = TunedTable(
            device=name, sm=self.limits.sm, shared_memory=self.limits.shared_memory, triton=version
        )
        return table_to_extend(folder / file_name(name), empty)


def _entry(
    shape: ProductShape, found: Found, num_tiles: int, inputs: Inputs, rival: float | None
) -> TunedEntry:
    return TunedEntry(
        shape=shape,
        tile=found.tile,
        microseconds=round(found.seconds * 1e6, 2),
        tflops=round(inputs.operations / found.seconds * 1e-12, 1),
        deep_gemm_tflops=None if rival is None else round(rival, 1),
        tried=(found.num_timed, num_tiles),
    )
