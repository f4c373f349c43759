"""Cuts compile for a Hopper GPU that is not here: within their memory, and without spilling.

Needs Triton and no GPU. Outside of the suite of a CPU machine because Triton is missing there.
"""

import importlib
import os
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.few_rows.cuts import Cut, block_m_of, candidates
from engine.kernels.triton_gemm.limits import HOPPER

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

NUM_CUTS = 6
"""Drawn anew each time, of each number of rows."""


class Elsewhere:
    """A driver that only says what it would run on."""

    def get_current_device(self) -> int:
        return HOPPER.sm

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", HOPPER.sm, 32)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter compiles nothing")
    driver = importlib.import_module("triton.runtime.driver").driver
    driver.set_active(Elsewhere())
    yield
    if torch.cuda.is_available():
        driver.reset_active()


def compile_cut(cut: Cut, num_rows: int) -> Any:
    product = importlib.import_module("engine.kernels.few_rows.product")
    e4m3 = torch.empty(16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    f32, bf16 = torch.empty(16), torch.empty(16, dtype=torch.bfloat16)
    block_m = block_m_of(num_rows)
    is_full = block_m == num_rows
    return product.multiply._kernel.warmup(
        e4m3, f32, e4m3, f32, bf16, f32, torch.empty(16, dtype=torch.int32),
        7168, 4096, 7168, 1, num_rows, num_rows,
        cut.block_n, block_m, cut.num_splits, is_full, cut.sum_rows(num_rows), False, cut.unroll,
        grid=(1,), num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip


def spilled_bytes(compiled: Any, folder: Path) -> int:
    """Return what PTX's own assembler says."""
    triton = importlib.import_module("triton")
    assembler = Path(str(triton.__file__)).parent / "backends/nvidia/bin/ptxas"
    file = folder / "kernel.ptx"
    file.write_text(compiled.asm["ptx"])
    command = [str(assembler), "-v", "--gpu-name=sm_90a", str(file), "-o", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"(\d+) bytes spill stores", done.stderr + done.stdout)
    assert found, done
    return int(found.group(1))


@pytest.mark.parametrize("num_rows", [1, 32, 40, 64, 100, 128])
def test_cuts_compile_within_their_memory(elsewhere: None, num_rows: int, tmp_path: Path) -> None:
    cuts = candidates(num_rows, 4096, 7168, HOPPER)
    largest = max(cuts, key=lambda cut: cut.shared_memory(num_rows))
    for cut in (largest, *random.sample(cuts, NUM_CUTS)):
        compiled = compile_cut(cut, num_rows)
        assert compiled.metadata.shared <= cut.shared_memory(num_rows), cut
        assert spilled_bytes(compiled, tmp_path) == 0, cut
        assert "wgmma.mma_async" in compiled.asm["ptx"]
