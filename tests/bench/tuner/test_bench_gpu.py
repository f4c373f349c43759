"""The tuner's inputs and its check of results; its timing needs a GPU.

The parts that time nothing also run in Triton's interpreter: TRITON_INTERPRET=1 pytest -m gpu.
"""

import importlib
from typing import Any

import pytest

from engine.formats.triton_gemm.candidates import candidates
from engine.formats.triton_gemm.limits import AMPERE, HOPPER, DeviceLimits
from engine.formats.triton_gemm.tables import choose
from engine.formats.triton_gemm.tiles import ProductShape, RowLayout
from tests.engine.triton_device import DEVICE, IS_INTERPRETED, skip_without_device

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SHAPES = [
    ProductShape(layout=RowLayout.PLAIN, num_rows=70, num_columns=160, depth=256),
    ProductShape(layout=RowLayout.ALIGNED, num_rows=512, num_columns=128, depth=128, num_experts=4),
    ProductShape(layout=RowLayout.MASKED, num_rows=5, num_columns=256, depth=128, num_experts=3),
]


@pytest.fixture(autouse=True)
def _needs_a_device() -> None:
    skip_without_device()


def load(name: str) -> Any:
    return importlib.import_module(f"bench.tuner.{name}")


@pytest.mark.parametrize("widen", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.layout))
def test_the_check_sees_right_and_wrong_products(shape: ProductShape, widen: bool) -> None:
    inputs = load("inputs").draw_inputs(shape, DEVICE)
    bench = load("bench").GpuBench(inputs, lambda: None, widen=widen, jobs=1)
    job = inputs.job
    job.launch(candidates(shape, AMPERE if widen else HOPPER)[0], widen=widen)
    assert bench._error(job.out) < load("bench").TOLERANCE
    rows = inputs.samples[-1].rows
    job.out.flatten(0, 1)[rows[0]] *= 1.5
    assert bench._error(job.out) > load("bench").TOLERANCE
    job.out.flatten(0, 1)[rows[-1], 3] = float("nan")
    assert not bench._error(job.out) < load("bench").TOLERANCE
    num_groups = shape.num_experts if shape.layout is RowLayout.MASKED else 1
    used = shape.num_rows * num_groups
    assert inputs.operations == 2 * used * shape.num_columns * shape.depth


@pytest.mark.skipif(IS_INTERPRETED, reason="compiles and times")
def test_a_gpu_is_tuned(tmp_path: Any) -> None:
    tuner = load("tuner").Tuner(DEVICE, 4)
    shapes, entries = zip(*tuner.tune(SHAPES, 6.0), strict=True)
    assert list(shapes) == [entry.shape for entry in entries] == SHAPES
    table = tuner.table(tmp_path).with_entries(entries)
    for entry in entries:
        assert entry.microseconds > 0
        assert 1 <= entry.tried[0] <= entry.tried[1]
        assert choose(entry.shape, table, DeviceLimits.of(DEVICE)) == entry.tile
