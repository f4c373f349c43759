"""The kernels of a reduce-scatter, all ranks on one device: sums by row, over many transfers.

They also run on a CPU in Triton's interpreter: TRITON_INTERPRET=1 pytest -m gpu.
"""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.parallel.nvlink.reduce_scatter import ReduceShape
from tests.engine.parallel.nvlink.one_device import DEVICE, IS_INTERPRETED, Poisoned, kernels

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

HIDDEN = 264 if IS_INTERPRETED else 7168
SHAPES = [(2, 5), (3, 9), (8, 2)]
LARGE = [(4, 16), (4, 1024), (8, 300)]


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if not IS_INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    torch.seed()  # fresh inputs every run
    if IS_INTERPRETED:  # as few programs as show how they share the work
        module = kernels("reduce_kernels")
        monkeypatch.setattr(module, "UNITS", 4)
        monkeypatch.setattr(module, "COPIED", 512)
        monkeypatch.setattr(module, "MANY", 4 * HIDDEN)


def all_ranks(shape: ReduceShape) -> tuple[Poisoned[ReduceShape], Sequence]:  # type: ignore[type-arg]
    world = Poisoned(shape)
    triton_sums = kernels("reduce_kernels").TritonSums
    return world, [triton_sums(window) for window in world.windows]


def draw(shape: ReduceShape, num_rows: int) -> Tensor:
    size = (shape.num_ranks * num_rows, shape.hidden_size)
    if IS_INTERPRETED:  # which cuts off where a GPU rounds: small whole numbers need neither
        return torch.randint(-9, 10, size).bfloat16()
    return torch.randn(size, device=DEVICE).bfloat16()


def expected(parts: Sequence[Tensor], owner: int, num_rows: int, own: Tensor | None) -> Tensor:
    """Sums in float32, what the rank adds first and then the ranks in order, rounded once."""
    rows = slice(owner * num_rows, (owner + 1) * num_rows)
    size = (num_rows, parts[0].shape[1])
    total = torch.zeros(size, device=DEVICE) if own is None else own.float()
    for part in parts:
        total = total + part[rows].float()
    return total.bfloat16()


@pytest.mark.parametrize("sizes", SHAPES if IS_INTERPRETED else SHAPES + LARGE)
def test_many_sums(sizes: tuple[int, int]) -> None:
    num_ranks, most = sizes
    shape = ReduceShape(num_ranks=num_ranks, max_rows=most, hidden_size=HIDDEN)
    world, ranks = all_ranks(shape)
    counts = [most, 1, 0, *(random.randint(0, most) for _ in range(2 if IS_INTERPRETED else 6))]
    for num_rows in counts:
        parts = [draw(shape, num_rows) for _ in ranks]
        kept = [part.clone() for part in parts]
        owns = [draw(shape, num_rows)[:num_rows] if rank % 2 else None for rank in range(num_ranks)]
        for rank, part in zip(ranks, parts, strict=True):
            rank.send(part)
        for owner in reversed(range(num_ranks)):
            got = ranks[owner].receive(parts[owner], owns[owner])
            assert torch.equal(got, expected(parts, owner, num_rows, owns[owner])), owner
            world.poison(owner)
        assert all(torch.equal(*pair) for pair in zip(parts, kept, strict=True))
    for window in world.windows:
        assert window.state.tolist() == [len(counts)] * 2


def test_what_is_no_number_stays_in_its_row() -> None:
    shape = ReduceShape(num_ranks=2, max_rows=3, hidden_size=HIDDEN)
    _, ranks = all_ranks(shape)
    parts = [draw(shape, 3) for _ in ranks]
    parts[1][0, 5] = torch.nan
    parts[1][4, 7] = torch.inf
    for rank, part in zip(ranks, parts, strict=True):
        rank.send(part)
    for owner, rank in enumerate(ranks):
        got = rank.receive(parts[owner], None)
        wanted = expected(parts, owner, 3, None)
        assert torch.equal(got.nan_to_num(nan=99.0), wanted.nan_to_num(nan=99.0))
        assert int((~torch.isfinite(got)).sum()) == 1
