"""How rows travel, line by line of the table, and what a group does with what was opened."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.options import TPExchangeKind
from engine.parallel.choose_tp_exchange import OpenGroup, choose_tp_exchange
from engine.parallel.groups import RankGroup
from engine.parallel.nvlink import open as nvlink
from engine.parallel.nvlink.all_gather import GatherShape, Lane, NvlinkAllGather
from engine.parallel.nvlink.reduce_scatter import NvlinkReduceScatter, ReduceShape
from engine.parallel.nvlink.shape import LINE
from engine.parallel.pending import Ready
from runtime.errors import ConfigError, InternalError

AUTO, NVLINK = TPExchangeKind.AUTO, TPExchangeKind.NVLINK
COLLECTIVES = TPExchangeKind.COLLECTIVES
GPU = torch.device("cuda")
FITTING: dict[str, Any] = {
    "device": GPU,
    "max_tokens": 1000,
    "hidden_size": 256,
    "is_scattered": True,
    "overlaps": False,
}
GROUP = RankGroup(rank=1, size=4)
GATHERS = GatherShape(num_ranks=4, max_rows=3, row_bytes=64)


class Kernels:
    """Sums of equal parts: every rank's are this one's."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        self.num_ranks, self.rank = num_ranks, rank
        self.calls: list[str] = []

    def send(self, partial_PD: Tensor) -> None:
        assert partial_PD.is_contiguous()
        self.calls.append("send")

    def receive(self, partial_PD: Tensor, own_TD: Tensor | None) -> Tensor:
        self.calls.append("receive")
        total = partial_PD.chunk(self.num_ranks)[self.rank] * self.num_ranks
        return total if own_TD is None else total + own_TD


class LaneKernels:
    """Gathers of equal rows: every rank's are this one's."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def send(self, rows_tX: Tensor) -> None:
        assert rows_tX.is_contiguous()

    def receive(self, rows_tX: Tensor) -> Tensor:
        return torch.cat([rows_tX] * self.num_ranks)


def open_fake(group: RankGroup, shape: ReduceShape) -> NvlinkReduceScatter:
    return NvlinkReduceScatter(shape, Kernels(group.size, group.rank))


def open_both(
    group: RankGroup, sums: ReduceShape, gathers: GatherShape
) -> tuple[NvlinkReduceScatter, NvlinkAllGather]:
    return open_fake(group, sums), gathers_of(gathers)


def gathers_of(shape: GatherShape) -> NvlinkAllGather:
    return NvlinkAllGather(shape, lambda lane: LaneKernels(shape.num_ranks))


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for NVLink; what was closed."""
    names: list[str] = []

    def opened(*args: Any) -> tuple[NvlinkReduceScatter, NvlinkAllGather]:
        sums, gathers = open_both(*args)
        sums.close = lambda: names.append("sums")
        gathers.close = lambda: names.append("gathers")
        return sums, gathers

    monkeypatch.setattr(nvlink, "open_nvlink_exchange", opened)
    return names


def choose(kind: TPExchangeKind, group: RankGroup = GROUP, **changes: Any) -> OpenGroup:
    return choose_tp_exchange(group, kind, **(FITTING | changes))


def test_stores_where_they_run(closed: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for kind in (AUTO, NVLINK):
        opened = choose(kind)
        sums, gathers = opened.group.sums, opened.group.gathers
        assert isinstance(sums, NvlinkReduceScatter)
        assert isinstance(gathers, NvlinkAllGather)
        assert sums.shape == ReduceShape(num_ranks=4, max_rows=250, hidden_size=256)
        assert gathers.shape == GatherShape(num_ranks=4, max_rows=250, row_bytes=512)
        assert opened.group == replace(GROUP, sums=sums, gathers=gathers)
        opened.close()
    assert closed == ["sums", "gathers"] * 2
    assert "name=nvlink wanted=auto" in caplog.text


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("cpu")}, "CPU"),
        ({"is_scattered": False}, "share of the rows"),
        ({"overlaps": True}, "two micro-batches"),
        ({"group": RankGroup()}, "alone"),
        ({"group": RankGroup(size=9)}, "2 to 8 ranks"),
        ({"hidden_size": 100}, "hidden_size"),
    ],
)
def test_the_library_elsewhere(
    changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    group = changes.get("group", GROUP)
    assert choose(AUTO, **changes).group is group
    assert choose(COLLECTIVES, **changes).group is group
    assert reason in caplog.text or group.size == 1
    with pytest.raises(ConfigError, match=reason):
        choose(NVLINK, **changes)


def test_without_a_gpu_it_is_refused_by_name_only() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert choose(AUTO).group is GROUP
    with pytest.raises(ConfigError, match="no GPU"):
        choose(NVLINK)


@given(num_rows=st.integers(0, 3), has_own=st.booleans())
def test_a_group_sums_by_what_was_opened(num_rows: int, has_own: bool) -> None:
    shape = ReduceShape(num_ranks=4, max_rows=3, hidden_size=8)
    opened = open_fake(GROUP, shape)
    group = GROUP.exchanging_by(opened, gathers_of(GATHERS))
    part = torch.randint(-9, 10, (4 * num_rows, 8)).bfloat16()
    own = torch.randint(-9, 10, (num_rows, 8)).bfloat16()
    summing = group.start_reduce_scatter(part, Ready(own) if has_own else None)
    expected = part[num_rows : 2 * num_rows] * 4 + (own if has_own else 0)
    assert torch.equal(summing.wait(), expected)


def test_what_does_not_fit_is_the_library_s() -> None:
    opened = open_fake(GROUP, ReduceShape(num_ranks=4, max_rows=3, hidden_size=8))
    assert opened.takes(torch.zeros(12, 8, dtype=torch.bfloat16))
    assert not opened.takes(torch.zeros(16, 8, dtype=torch.bfloat16)), "more rows"
    assert not opened.takes(torch.zeros(12, 8)), "float32"
    assert not opened.takes(torch.zeros(12, 16, dtype=torch.bfloat16)), "wider"
    assert not opened.takes(torch.zeros(8, dtype=torch.bfloat16)), "no rows"
    alone = RankGroup().start_reduce_scatter(torch.ones(2, 2), Ready(torch.ones(2, 2)))
    assert torch.equal(alone.wait(), torch.full((2, 2), 2.0))


def test_a_sum_is_received_before_the_next_is_sent() -> None:
    opened = open_fake(GROUP, ReduceShape(num_ranks=4, max_rows=3, hidden_size=8))
    part = torch.zeros(4, 8, dtype=torch.bfloat16)
    first = opened.start(part)
    with pytest.raises(InternalError, match="reduce-scatter"):
        opened.start(part)
    first.wait()
    opened.start(part).wait()
    kernels = opened.kernels
    assert isinstance(kernels, Kernels)
    assert kernels.calls == ["send", "receive"] * 2


def rows(num_rows: int, width: int) -> Tensor:
    return torch.randint(256, (num_rows, width)).to(torch.uint8)


def test_a_lane_is_free_again_when_a_sum_has_come() -> None:
    gathers = gathers_of(GATHERS)
    sums = open_fake(GROUP, ReduceShape(num_ranks=4, max_rows=3, hidden_size=8))
    group = GROUP.exchanging_by(sums, gathers)
    part = torch.zeros(12, 8, dtype=torch.bfloat16)
    first = rows(3, 32)
    assert torch.equal(group.start_all_gather(first).wait(), torch.cat([first] * 4))
    assert not gathers.takes(first)
    assert gathers.takes(rows(3, 16)), "another lane"
    with pytest.raises(InternalError, match="lane"):
        gathers.start(first)
    summing = group.start_reduce_scatter(part)
    assert not gathers.takes(first), "it is sent, and not received"
    summing.wait()
    assert gathers.takes(first)


def test_rows_that_have_no_lane_are_the_library_s() -> None:
    gathers = gathers_of(GATHERS)
    assert not gathers.takes(rows(4, 32)), "more rows"
    assert not gathers.takes(rows(0, 32)), "none"
    assert not gathers.takes(rows(1, 8)), "less than a thread copies"
    assert not gathers.takes(rows(3, 1024)), "wider than there is room for"
    for width in (16, 32):
        gathers.start(rows(3, width)).wait()
    gathers.met()
    assert gathers.takes(rows(2, 32))
    assert not gathers.takes(rows(3, 160)), "no room is left"


@given(
    widths=st.lists(st.sampled_from([16, 32, 48, 64, 80, 4096]), min_size=1, max_size=12),
    num_ranks=st.integers(2, 8),
)
def test_lanes_lie_apart_in_the_buffer(widths: list[int], num_ranks: int) -> None:
    shape = GatherShape(num_ranks=num_ranks, max_rows=5, row_bytes=200)
    lanes: list[tuple[int, int]] = []
    counters: list[int] = []

    def open_lane(lane: Lane) -> LaneKernels:
        counters.append(lane.counters)
        lanes.append((lane.first, lane.first + num_ranks * 5 * width))
        return LaneKernels(num_ranks)

    gathers = NvlinkAllGather(shape, open_lane)
    for width in widths:
        if gathers.takes(rows(5, width)):
            gathers.start(rows(5, width)).wait()
    assert sorted(counters) == [index * 2 * LINE for index in range(len(counters))]
    edges = [shape.halves, *(edge for lane in lanes for edge in lane), shape.buffer_bytes]
    assert edges == sorted(edges)
    assert bool(lanes) == any(width <= 200 for width in widths)
