"""Tiles compile for GPUs that are not here, and take no more shared memory than was reckoned.

Needs Triton and no GPU: its compiler is told which one to build for. Outside of the suite of a CPU
machine because Triton is missing there.
"""

import importlib
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.kernels.triton_gemm.candidates import candidates, shared_memory
from engine.kernels.triton_gemm.limits import ADA, AMPERE, HOPPER, DeviceLimits
from engine.kernels.triton_gemm.tiles import ProductShape, RowLayout

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

NUM_TILES = 12
"""Drawn anew each time, of each kind of GPU."""


class Elsewhere:
    """A driver that only says what it would run on."""

    def __init__(self, limits: DeviceLimits) -> None:
        compiler = importlib.import_module("triton.backends.compiler")
        self._target = compiler.GPUTarget("cuda", limits.sm, 32)

    def get_current_device(self) -> int:
        # Kernels that are compiled are kept by device: one number for each kind.
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@pytest.fixture
def driver() -> Iterator[Any]:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter compiles nothing")
    driver = importlib.import_module("triton.runtime.driver").driver
    yield driver
    if torch.cuda.is_available():
        driver.reset_active()


@pytest.mark.parametrize("limits", [AMPERE, ADA, HOPPER], ids=["ampere", "ada", "hopper"])
@pytest.mark.parametrize("layout", list(RowLayout))
def test_tiles_compile_within_their_memory(
    driver: Any, limits: DeviceLimits, layout: RowLayout
) -> None:
    shape = ProductShape(layout=layout, num_rows=4096, num_columns=512, depth=1024, num_experts=4)
    module = importlib.import_module("engine.kernels.triton_gemm.gemm")
    driver.set_active(Elsewhere(limits))
    num_groups = 4 if layout is RowLayout.MASKED else 1
    job = module.Product(
        layout=layout,
        rows=(
            torch.empty(num_groups, 4096, 1024, dtype=torch.float8_e4m3fn),
            torch.empty(num_groups, 8, 4096).transpose(1, 2),
        ),
        weight=(
            torch.empty(4, 512, 1024, dtype=torch.float8_e4m3fn),
            torch.empty(4, 4, 8),
        ),
        experts=torch.empty(4096, dtype=torch.int32),
        out=torch.empty(num_groups, 4096, 512, dtype=torch.bfloat16),
    )
    tiles = candidates(shape, limits)
    largest = max(tiles, key=lambda tile: shared_memory(tile, limits))
    for tile in (tiles[0], largest, *random.sample(tiles, NUM_TILES)):
        compiled = job.compile(tile, widen=not limits.has_fp8)
        assert compiled.metadata.shared <= shared_memory(tile, limits), tile
