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
from engine.parallel.pair_rows import PairRows
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
LOCAL, TOP_K = (2, 3) if IS_INTERPRETED else (8, 8)
"""Experts of a rank, and of a token."""


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh()
    if IS_INTERPRETED:  # as few programs as show how they share the work
        module = kernels("share_kernels")
        monkeypatch.setattr(module, "UNITS", 4)
        monkeypatch.setattr(kernels("sums"), "UNITS", 4)
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


def draw_pairs(shape: ReduceShape, num_tokens: int) -> list[PairRows]:
    """Return every rank's rows of the same tokens; some experts are no rank's, some pairs none."""
    num_pairs, experts = shape.num_ranks * num_tokens, LOCAL * (shape.num_ranks + 1)
    ids = torch.rand(num_pairs, experts, device=DEVICE).topk(TOP_K, dim=1).indices
    ids[torch.rand(ids.shape, device=DEVICE) < 0.2] = -1
    weights = 2.0 ** torch.randint(-1, 2, ids.shape, device=DEVICE).float()
    found = []
    for rank in range(shape.num_ranks):
        is_here = ids.div(LOCAL, rounding_mode="floor") == rank
        num_rows = int(is_here.sum())
        places = torch.full(ids.shape, -1, dtype=torch.int32, device=DEVICE)
        places[is_here] = torch.randperm(num_rows, device=DEVICE).int() + 1
        found.append(
            PairRows(
                rows_MD=draw(shape, num_rows + 2)[: num_rows + 2],
                places_PK=places,
                weights_PK=weights.masked_fill(~is_here, torch.nan),
                own_ids_TK=ids[rank * num_tokens : (rank + 1) * num_tokens].contiguous(),
                num_local_experts=LOCAL,
            )
        )
    return found


def summed_per_token(pairs: PairRows) -> Tensor:
    """[P, D]: in float32, in the order of choices, rounded once."""
    total = torch.zeros(pairs.places_PK.shape[0], HIDDEN, device=DEVICE)
    for places, weights in zip(pairs.places_PK.T, pairs.weights_PK.T, strict=True):
        here = places >= 0
        total[here] += pairs.rows_MD[places[here].long()].float() * weights[here, None]
    return total.bfloat16()


@pytest.mark.parametrize("sizes", SHAPES if IS_INTERPRETED else SHAPES + LARGE)
def test_many_sums_of_pairs(sizes: tuple[int, int]) -> None:
    """What is not sent is not read: buffers are poisoned behind every transfer."""
    num_ranks, most = sizes
    shape = ReduceShape(num_ranks=num_ranks, max_rows=most, hidden_size=HIDDEN)
    world, ranks = all_ranks(shape)
    counts = [most, 1, 0, *(random.randint(0, most) for _ in range(1 if IS_INTERPRETED else 6))]
    for num_tokens in counts:
        pairs = draw_pairs(shape, num_tokens)
        parts = [summed_per_token(mine) for mine in pairs]
        owns = [
            draw(shape, num_tokens)[:num_tokens] if rank % 2 else None for rank in range(num_ranks)
        ]
        for rank, mine in zip(ranks, pairs, strict=True):
            rank.send_pairs(mine)
        for owner in reversed(range(num_ranks)):
            got = ranks[owner].receive_pairs(pairs[owner], owns[owner])
            assert torch.equal(got, expected(parts, owner, num_tokens, owns[owner])), owner
            half = shape.halves + int(world.windows[owner].state[0]) % 2 * shape.half_bytes
            world.buffers[owner][half : half + shape.half_bytes] = 0xFF
        if num_tokens:  # sums of either kind take turns in the same halves
            for rank, part in zip(ranks, parts, strict=True):
                rank.send(part)
            for owner, rank in enumerate(ranks):
                got = rank.receive(parts[owner], owns[owner])
                assert torch.equal(got, expected(parts, owner, num_tokens, owns[owner])), owner


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
