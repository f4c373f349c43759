"""How sums are chosen, line by line of the table, and what a group does with what was opened."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.options import ReduceScatterKind
from engine.parallel.choose_reduce_scatter import OpenGroup, choose_reduce_scatter
from engine.parallel.groups import RankGroup
from engine.parallel.nvlink import open as nvlink
from engine.parallel.nvlink.reduce_scatter import NvlinkReduceScatter, ReduceShape
from engine.parallel.pending import Ready
from runtime.errors import ConfigError, InternalError

AUTO, NVLINK = ReduceScatterKind.AUTO, ReduceScatterKind.NVLINK
COLLECTIVES = ReduceScatterKind.COLLECTIVES
GPU = torch.device("cuda")
FITTING: dict[str, Any] = {
    "device": GPU,
    "max_tokens": 1000,
    "hidden_size": 256,
    "is_scattered": True,
    "overlaps": False,
}
GROUP = RankGroup(rank=1, size=4)


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


def open_fake(group: RankGroup, shape: ReduceShape) -> NvlinkReduceScatter:
    return NvlinkReduceScatter(shape, Kernels(group.size, group.rank))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvlink, "open_nvlink_reduce_scatter", open_fake)


def choose(kind: ReduceScatterKind, group: RankGroup = GROUP, **changes: Any) -> OpenGroup:
    return choose_reduce_scatter(group, kind, **(FITTING | changes))


@pytest.mark.usefixtures("installed")
def test_stores_where_they_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for kind in (AUTO, NVLINK):
        opened = choose(kind)
        sums = opened.group.sums
        assert isinstance(sums, NvlinkReduceScatter)
        assert sums.shape == ReduceShape(num_ranks=4, max_rows=250, hidden_size=256)
        assert opened.close == sums.close
        assert opened.group == replace(GROUP, sums=sums)
    assert "name=nvlink wanted=auto" in caplog.text


@pytest.mark.usefixtures("installed")
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
    group = GROUP.summed_by(opened)
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
