"""The kernels of an exchange, all ranks on one device: who gets what, over many transfers.

They also run on a CPU in Triton's interpreter: TRITON_INTERPRET=1 pytest -m gpu.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.parallel.nvlink.records import SLOTS, records_of
from engine.parallel.nvlink.shape import NvlinkShape
from tests.engine.parallel.nvlink.one_device import (
    DEVICE,
    IS_INTERPRETED,
    OneDevice,
    Tokens,
    begin_afresh,
    draw_out,
    draw_tokens,
    expected_places,
    expected_sum,
    kernels,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    # Of the interpreter, where a loop's bounds come from memory.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

HIDDEN = 256 if IS_INTERPRETED else 7168


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh()
    if IS_INTERPRETED:  # as few programs as show how they share the work
        for name in ("rows", "sums"):
            monkeypatch.setattr(kernels(name), "UNITS", 4)
        monkeypatch.setattr(kernels("rows"), "RECEIVERS", 8)
        monkeypatch.setattr(kernels("sums"), "SENDERS", 8)


def shape_of(ranks: int, experts: int, tokens: int, top_k: int = 4) -> NvlinkShape:
    return NvlinkShape(
        num_ranks=ranks,
        num_experts=experts,
        max_tokens_per_rank=tokens,
        hidden_size=HIDDEN,
        top_k=top_k,
    )


def assert_received(shape: NvlinkShape, tokens: Sequence[Tokens], received: Sequence[Any]) -> None:
    data = [mine.rows.data_TK.view(torch.uint8) for mine in tokens]
    for rank, got in enumerate(received):
        places = expected_places(shape, tokens, rank)
        assert got.rows.num_rows_L.tolist() == [len(place) for place in places]
        row_of = {}
        for local, slots in enumerate(places):
            for row, slot in enumerate(slots):
                source, token = divmod(slot, shape.max_tokens_per_rank)
                arrived = got.rows.data_LMD[local, row].view(torch.uint8)
                assert torch.equal(arrived, data[source][token])
                scale = tokens[source].rows.scale_TG[token]
                assert torch.equal(got.rows.scale_LMG[local, row], scale)
                row_of[slot, rank * shape.num_local_experts + local] = (
                    local * shape.rows_per_expert + row
                )
        for source, mine in enumerate(tokens):
            first = source * shape.max_tokens_per_rank
            ids = mine.ids.tolist()
            expected = [[row_of.get((first + t, e), -1) for e in ids[t]] for t in range(len(ids))]
            unused = [[-1] * shape.top_k] * (shape.max_tokens_per_rank - len(ids))
            end = first + shape.max_tokens_per_rank
            assert got.places.rows_TK[first:end].tolist() == expected + unused


def assert_home(
    shape: NvlinkShape, outs: Sequence[Tensor], tokens: Sequence[Tokens], home: Sequence[Tensor]
) -> None:
    for owner, actual in enumerate(home):
        assert torch.equal(actual, expected_sum(shape, outs, tokens, owner)), owner


def draw_counts(shape: NvlinkShape) -> list[int]:
    counts = [random.randint(0, shape.max_tokens_per_rank) for _ in range(shape.num_ranks)]
    counts[random.randrange(shape.num_ranks)] = 0
    counts[random.randrange(shape.num_ranks)] = shape.max_tokens_per_rank
    return counts


SHAPES = [(2, 6, 5, 4), (3, 24, 9, 3), (8, 16, 2, 2)]
LARGE = [(2, 256, 200, 8), (3, 288, 128, 8), (8, 256, 128, 8), (4, 64, 7, 6)]


@pytest.mark.parametrize("sizes", SHAPES if IS_INTERPRETED else SHAPES + LARGE)
def test_many_steps(sizes: tuple[int, int, int, int]) -> None:
    shape = shape_of(*sizes)
    world = OneDevice(shape)
    num_steps = 2 if IS_INTERPRETED else 3
    for _ in range(num_steps):
        tokens = [draw_tokens(shape, count) for count in draw_counts(shape)]
        received = world.dispatch(tokens)
        assert_received(shape, tokens, received)
        outs = [draw_out(shape) for _ in range(shape.num_ranks)]
        assert_home(shape, outs, tokens, world.combine(outs, received, tokens))
    for window in world.windows:
        assert window.state.tolist() == [2 * num_steps] * 2


def test_dispatches_and_combines_come_in_any_order() -> None:
    shape = shape_of(3, 12, 5)
    world = OneDevice(shape)
    batches = [[draw_tokens(shape, count) for count in draw_counts(shape)] for _ in range(2)]
    received = [world.dispatch(tokens) for tokens in batches]
    for tokens, got in zip(batches, received, strict=True):
        assert_received(shape, tokens, got)
    outs = [[draw_out(shape) for _ in range(shape.num_ranks)] for _ in batches]
    for tokens, got, out in zip(batches, received, outs, strict=True):
        assert_home(shape, out, tokens, world.combine(out, got, tokens))


def test_all_tokens_to_one_rank_and_none_to_another() -> None:
    shape = shape_of(4, 16, 6)
    world = OneDevice(shape)
    last = range(12, 16)
    tokens = [draw_tokens(shape, 6, experts=last, share_lost=0.0) for _ in range(4)]
    received = world.dispatch(tokens)
    assert_received(shape, tokens, received)
    assert received[3].rows.num_rows_L.tolist() == [24] * 4
    outs = [draw_out(shape) for _ in range(4)]
    assert_home(shape, outs, tokens, world.combine(outs, received, tokens))


def test_nobody_has_a_token() -> None:
    shape = shape_of(2, 4, 3, 2)
    world = OneDevice(shape)
    for _ in range(2):
        tokens = [draw_tokens(shape, 0) for _ in range(2)]
        received = world.dispatch(tokens)
        assert_received(shape, tokens, received)
        outs = [draw_out(shape) for _ in range(2)]
        home = world.combine(outs, received, tokens)
        assert [out.shape for out in home] == [(0, HIDDEN)] * 2


@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 0), (1, 5, 2)])
def test_padding_is_received_by_nobody_and_comes_back_as_zero(counts: tuple[int, ...]) -> None:
    """Rows of no token, whose experts are -1: NaN, with weights of NaN."""
    shape = shape_of(3, 6, 8)
    world = OneDevice(shape)
    tokens = [draw_tokens(shape, count, share_lost=0.0) for count in counts]
    padded = [pad(mine, 3) for mine in tokens]
    received = world.dispatch(padded)
    assert_received(shape, padded, received)
    num_rows = sum(int(got.rows.num_rows_L.sum()) for got in received)
    assert num_rows == sum(counts) * shape.top_k, "no row for padding"
    outs = [draw_out(shape) for _ in range(3)]
    home = world.combine(outs, received, padded)
    for owner, (mine, count) in enumerate(zip(home, counts, strict=True)):
        assert torch.equal(mine[:count], expected_sum(shape, outs, tokens, owner))
        assert (mine[count:] == 0).all()


def pad(tokens: Tokens, number: int) -> Tokens:
    """Return the tokens with rows of no token behind them; their own term is zero there."""
    count, size = tokens.rows.data_TK.shape
    rows = reference.quantize_rows(torch.full((count + number, size), torch.nan, device=DEVICE))
    rows.data_TK.view(torch.uint8)[:count] = tokens.rows.data_TK.view(torch.uint8)
    rows.scale_TG[:count] = tokens.rows.scale_TG

    def longer(x: Tensor, value: float) -> Tensor:
        return torch.cat((x, x.new_full((number, x.shape[1]), value)))

    return Tokens(
        rows=rows,
        ids=longer(tokens.ids, -1),
        weights=longer(tokens.weights, torch.nan),
        own=None if tokens.own is None else longer(tokens.own, 0.0),
    )


def test_an_expert_named_twice_has_one_row() -> None:
    shape = shape_of(2, 4, 3, 4)
    world = OneDevice(shape)
    drawn = [draw_tokens(shape, 3, share_lost=0.0) for _ in range(2)]
    ids = torch.tensor([[1, 1, 3, -1], [1, 2, 2, 2], [-1, -1, -1, -1]], device=DEVICE)
    tokens = [Tokens(rows=mine.rows, ids=ids, weights=mine.weights, own=mine.own) for mine in drawn]
    received = world.dispatch(tokens)
    assert_received(shape, tokens, received)
    outs = [draw_out(shape) for _ in range(2)]
    assert_home(shape, outs, tokens, world.combine(outs, received, tokens))


def test_ranks_run_ahead_of_one_another() -> None:
    """Whoever may go on does, in any order; what was received is poisoned at once."""
    shape = shape_of(3, 6, 4)
    world = OneDevice(shape)
    units = kernels("rows").UNITS
    num_layers = 4
    steps = [[draw_tokens(shape, count) for count in draw_counts(shape)] for _ in range(num_layers)]
    outs = [[draw_out(shape) for _ in range(shape.num_ranks)] for _ in range(num_layers)]
    homes: list[list[Tensor]] = [[] for _ in range(shape.num_ranks)]

    def live(rank: int) -> Iterator[None]:
        """Yield where the rank would wait."""
        exchange = kernels("triton_exchange").TritonExchange(world.windows[rank])
        for tokens, out in zip(steps, outs, strict=True):
            mine = tokens[rank]
            exchange.send_rows(mine.rows, mine.ids, mine.weights)
            yield
            received = exchange.receive_rows(1)
            world.poison(rank)
            yield
            exchange.send_sums(out[rank], received)
            yield
            homes[rank].append(exchange.receive_sums(mine.ids, mine.own))
            world.poison(rank)
            yield

    lives = {rank: live(rank) for rank in range(shape.num_ranks)}
    most_ahead = 0
    while lives:
        rank = random.choice(list(lives))
        sent, received = (int(world.windows[rank].state[i]) for i in (1, 0))
        if sent == received or world.has_arrived(rank, units):
            try:
                next(lives[rank])
            except StopIteration:
                del lives[rank]
        numbers = [int(window.state[1]) for window in world.windows]
        most_ahead = max(most_ahead, max(numbers) - min(numbers))
    assert most_ahead == 1
    for layer, (tokens, out) in enumerate(zip(steps, outs, strict=True)):
        assert_home(shape, out, tokens, [home[layer] for home in homes])


def test_counters_wrap() -> None:
    shape = shape_of(2, 4, 3, 2)
    world = OneDevice(shape)
    # As if so many transfers had been made that the counters are about to start again.
    units = 4 if IS_INTERPRETED else 128
    done = 2 * (2**31 // units) - 2
    for window, buffer in zip(world.windows, world.buffers, strict=True):
        window.state.fill_(done)
        buffer[: shape.halves].view(torch.int32).view(2, -1)[:, :2] = done // 2 * units
    for _ in range(3):
        tokens = [draw_tokens(shape, 2) for _ in range(2)]
        received = world.dispatch(tokens)
        outs = [draw_out(shape) for _ in range(2)]
        assert_home(shape, outs, tokens, world.combine(outs, received, tokens))


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_transfers_are_recorded_and_nothing_else_changes(num_ranks: int) -> None:
    """All have sent before one looks: every source was there when the wait began."""
    shape = shape_of(num_ranks, 2 * num_ranks, 3, 2)
    plain, recorded = OneDevice(shape), OneDevice(shape, records=True)
    rows = [0] * num_ranks
    for _ in range(2):
        tokens = [draw_tokens(shape, count) for count in draw_counts(shape)]
        outs = [draw_out(shape) for _ in range(num_ranks)]
        homes = []
        for world in (plain, recorded):
            received = world.dispatch(tokens)
            assert_received(shape, tokens, received)
            homes.append(world.combine(outs, received, tokens))
        assert all(torch.equal(*pair) for pair in zip(*homes, strict=True))
        rows = [int(got.rows.num_rows_L.sum()) for got in received]
    for rank, window in enumerate(recorded.windows):
        assert window.ring is not None
        found = records_of(window.ring.cpu(), rank)
        assert found.numbers.tolist() == [1, 2, 3, 4]
        assert found.are_combines.tolist() == [False, True] * 2
        assert found.num_rows[2] == rows[rank]
        assert (found.first_ns == found.begin_ns[:, None]).all()
        assert (found.last_ns == found.begin_ns[:, None]).all()
        assert (np.diff(found.begin_ns) > 0).all()
    assert all(window.ring is None for window in plain.windows)


def test_the_ring_goes_round() -> None:
    shape = shape_of(2, 4, 3, 2)
    world = OneDevice(shape, records=True)
    for window in world.windows:
        window.state.fill_(2 * SLOTS - 1)
    for buffer in world.buffers:
        units = 4 if IS_INTERPRETED else 128
        lines = buffer[: shape.halves].view(torch.int32).view(2, -1)
        lines[0, :2], lines[1, :2] = (SLOTS - 1) * units, SLOTS * units
    tokens = [draw_tokens(shape, 2) for _ in range(2)]
    world.dispatch(tokens)
    world.dispatch(tokens)
    for window in world.windows:
        assert window.ring is not None
        assert window.ring[:2, 0].tolist() == [4 * SLOTS, 4 * SLOTS + 2]
        assert not window.ring[2:].any()


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU would wait")
def test_nothing_is_received_before_all_have_sent(records: bool) -> None:
    shape = shape_of(2, 4, 3, 2)
    world = OneDevice(shape, records=records)
    mine = draw_tokens(shape, 2)
    kernels("rows").send_rows(world.windows[0], mine.rows, mine.ids, mine.weights)
    with pytest.raises(Exception, match="not all ranks have sent"):
        kernels("rows").receive_rows(world.windows[0], 1)
