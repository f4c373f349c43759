"""The kernels of sums and gathers, all ranks on one device, over many transfers.

They also run on a CPU in Triton's interpreter: TRITON_INTERPRET=1 pytest -m gpu.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.parallel.nvlink.all_gather import GatherShape, Lane, NvlinkAllGather
from engine.parallel.nvlink.reduce_scatter import ReduceShape
from engine.parallel.nvlink.window import Window
from tests.engine.parallel.nvlink.one_device import (
    DEVICE,
    IS_INTERPRETED,
    Poisoned,
    begin_afresh,
    kernels,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

HIDDEN = 264 if IS_INTERPRETED else 7168
SHAPES = [(2, 5), (3, 9), (8, 2)]
LARGE = [(4, 16), (4, 1024), (8, 300)]


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh()
    if IS_INTERPRETED:  # as few programs as show how they share the work
        module = kernels("share_kernels")
        monkeypatch.setattr(module, "UNITS", 4)
        monkeypatch.setattr(module, "COPIED", 512)
        monkeypatch.setattr(module, "GATHERED", 128)
        monkeypatch.setattr(module, "MANY", 4 * HIDDEN)


def all_ranks(shape: ReduceShape) -> tuple[Poisoned[ReduceShape], list[Any]]:
    world = Poisoned(shape)
    triton_sums = kernels("share_kernels").TritonSums
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
            shape_half = shape.halves + int(world.windows[owner].state[0]) % 2 * shape.half_bytes
            world.buffers[owner][shape_half : shape_half + shape.half_bytes] = 0xFF
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


@pytest.mark.parametrize("sizes", SHAPES if IS_INTERPRETED else SHAPES + LARGE)
def test_many_gathers(sizes: tuple[int, int]) -> None:
    num_ranks, most = sizes
    widths = (96, 4224, 64)
    shape = GatherShape(num_ranks=num_ranks, max_rows=most, row_bytes=5000)
    world = Poisoned(shape)
    ranks = [gathers_of(world, rank) for rank in range(num_ranks)]
    counts = [most, 1, *(random.randint(1, most) for _ in range(2 if IS_INTERPRETED else 6))]
    for num_rows in counts:
        sent = {
            width: [
                torch.randint(256, (num_rows, width), device=DEVICE).to(torch.uint8) for _ in ranks
            ]
            for width in widths
        }
        sent[8] = [torch.randn(num_rows, 8, device=DEVICE).bfloat16() for _ in ranks]
        for rank in ranks:
            assert all(rank.takes(parts[0]) for parts in sent.values())
        flying = {
            width: [rank.start(part) for rank, part in zip(ranks, parts, strict=True)]
            for width, parts in sent.items()
        }
        for width in reversed(list(sent)):
            for pending in flying[width]:
                assert torch.equal(pending.wait(), torch.cat(sent[width])), width
        for rank in ranks:
            assert not any(rank.takes(parts[0]) for parts in sent.values()), "not met yet"
            rank.met()
        for buffer in world.buffers:  # what was read is anybody's now
            buffer[shape.halves :] = 0xFF


def gathers_of(world: Poisoned[GatherShape], rank: int) -> NvlinkAllGather:
    """Return what a rank gathers by, whose lanes are in the world's buffers."""
    triton_lane = kernels("share_kernels").TritonLane

    def open_lane(lane: Lane) -> Any:
        addresses = [buffer.data_ptr() + lane.counters for buffer in world.buffers]
        window = Window.open(world.shape, rank, addresses, DEVICE)
        return triton_lane(window, lane, world.buffers[rank])

    return NvlinkAllGather(world.shape, open_lane)
