"""Who may go on when: ranks that are threads sum and gather over memory that all of them write."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.parallel.groups import RankGroup
from engine.parallel.nvlink.all_gather import GatherShape
from engine.parallel.nvlink.reduce_scatter import ReduceShape
from engine.parallel.pending import Pending, Ready
from tests.engine.parallel.nvlink.shared_memory import SharedExchange
from tests.engine.parallel.thread_ranks import Meetings, ThreadGroup, run_ranks

HIDDEN, MOST, WIDTHS = 16, 3, (16, 32, 48)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Rows of a width; more of them than a lane takes are the library's."""

    width: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Of rows for each rank; more than there is room for are the library's."""

    num_rows: int
    has_own: bool


ROWS = st.integers(1, MOST + 1)
CALLS = st.lists(
    st.builds(Gather, width=st.sampled_from(WIDTHS), num_rows=ROWS)
    | st.builds(Sum, num_rows=ROWS, has_own=st.booleans()),
    min_size=1,
    max_size=24,
)


def drawn(call: Gather | Sum, place: int, rank: int, num_ranks: int) -> Tensor:
    """What a rank brings: other numbers in each call."""
    generator = torch.Generator().manual_seed(1000 * place + rank)
    if isinstance(call, Gather):
        size = (call.num_rows, call.width)
        return torch.randint(256, size, generator=generator).to(torch.uint8)
    size = (num_ranks * call.num_rows, HIDDEN)
    return torch.randint(-9, 10, size, generator=generator).bfloat16()


def expected(call: Gather | Sum, place: int, rank: int, num_ranks: int) -> Tensor:
    """What the rank gets; whole numbers, which no order of adding changes."""
    parts = [drawn(call, place, peer, num_ranks) for peer in range(num_ranks)]
    if isinstance(call, Gather):
        return torch.cat(parts)
    total = torch.stack([part.chunk(num_ranks)[rank] for part in parts]).sum(0)
    return total + own_of(call) if call.has_own else total


def own_of(call: Sum) -> Tensor:
    return torch.full((call.num_rows, HIDDEN), 3.0).bfloat16()


def follow(group: RankGroup, calls: list[Gather | Sum]) -> int:
    """Make all calls; gathers are read as late as may be. Returns how many went by stores."""
    unread: list[tuple[int, Gather, Tensor]] = []

    def read() -> None:
        for place, call, rows in unread:
            assert torch.equal(rows, expected(call, place, group.rank, group.size)), place
        unread.clear()

    num_stored = 0
    assert group.gathers is not None
    for place, call in enumerate(calls):
        mine = drawn(call, place, group.rank, group.size)
        if isinstance(call, Gather):
            num_stored += group.gathers.takes(mine)
            unread.append((place, call, group.start_all_gather(mine).wait()))
            continue
        read()  # before the sum is sent
        own: Pending[Tensor] | None = Ready(own_of(call)) if call.has_own else None
        total = group.start_reduce_scatter(mine, own).wait()
        assert torch.equal(total, expected(call, place, group.rank, group.size)), place
    read()
    return num_stored


@settings(max_examples=40, deadline=None)
@given(calls=CALLS, num_ranks=st.integers(2, 4), seed=st.integers(0, 2**32))
def test_nobody_reads_what_is_not_his(calls: list[Gather | Sum], num_ranks: int, seed: int) -> None:
    shared = SharedExchange(
        ReduceShape(num_ranks=num_ranks, max_rows=MOST, hidden_size=HIDDEN),
        GatherShape(num_ranks=num_ranks, max_rows=MOST, row_bytes=64),
        seed=seed,
    )

    def run(rank: int, meetings: Meetings) -> int:
        group = ThreadGroup(rank=rank, size=num_ranks, meetings=meetings)
        return follow(group.exchanging_by(*shared.open(rank)), calls)

    stored = run_ranks(num_ranks, run)
    assert len(set(stored)) == 1, "all ranks choose alike"


def test_layers_go_by_stores_alone() -> None:
    """As a model calls: latents and a sum, then routing and rows and a sum."""
    rng = random.Random(1)
    layer: list[Gather | Sum] = [
        Gather(width=16, num_rows=3),
        Sum(num_rows=3, has_own=False),
        Gather(width=16, num_rows=1),
        Gather(width=32, num_rows=3),
        Sum(num_rows=3, has_own=True),
    ]
    shared = SharedExchange(
        ReduceShape(num_ranks=3, max_rows=MOST, hidden_size=HIDDEN),
        GatherShape(num_ranks=3, max_rows=MOST, row_bytes=64),
        seed=rng.randrange(2**32),
    )

    def run(rank: int, meetings: Meetings) -> int:
        group = ThreadGroup(rank=rank, size=3, meetings=meetings)
        return follow(group.exchanging_by(*shared.open(rank)), layer * 20)

    assert run_ranks(3, run) == [60] * 3


def test_a_lane_that_is_taken_too_early_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above tells: without the rule that a lane waits for a sum, rows are wrong."""
    calls: list[Gather | Sum] = [Gather(width=16, num_rows=3)] * 20
    seen = 0
    for seed in range(20):
        shared = SharedExchange(
            ReduceShape(num_ranks=4, max_rows=MOST, hidden_size=HIDDEN),
            GatherShape(num_ranks=4, max_rows=MOST, row_bytes=64),
            seed=seed,
        )

        def run(rank: int, meetings: Meetings, shared: SharedExchange = shared) -> int:
            sums, gathers = shared.open(rank)
            monkeypatch.setattr(gathers, "_used", _Forgets())
            group = ThreadGroup(rank=rank, size=4, meetings=meetings)
            return follow(group.exchanging_by(sums, gathers), calls)

        try:
            run_ranks(4, run)
        except AssertionError:
            seen += 1
    assert seen > 0


class _Forgets(set[int]):
    def add(self, element: int) -> None:
        pass
