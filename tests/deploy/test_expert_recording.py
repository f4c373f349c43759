"""Windows of an instance's ranks are added up where all of them have told of the same passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deploy.clients.expert_recording import instances_to_record, record
from deploy.errors import ClusterError, WrongArgumentError
from deploy.plan import Role
from deploy.views.pool_watch import PoolMember
from experts.trace import ExpertTrace
from router.pool.expert_recording import Rank, Recorded, Wanted, passes_of_a_window
from runtime.net.roles import Role as Callee
from tests.engine.tiny import TINY
from tests.worker.counted_rank import CREDENTIALS, EXPERTS, listening, make_experts
from tests.worker.counted_rank import Rank as CountedRank


@pytest.fixture
def ranks(tmp_path: Path) -> list[CountedRank]:
    return [CountedRank(make_experts(tmp_path / str(number))) for number in range(2)]


async def recorded(
    ranks: list[CountedRank], wanted: Wanted, run: Callable[[], None], *, num_asked: int = 2
) -> ExpertTrace:
    """What is recorded of what `run` does once both ranks are followed."""
    async with listening(ranks[0].feed) as first, listening(ranks[1].feed) as second:
        instance = [
            Rank(instance="decode-0", number=number, address=address, role=Callee.DECODE)
            for number, address in enumerate((first, second)[:num_asked])
        ]
        told: list[Recorded] = []
        task = asyncio.ensure_future(
            record({"decode-0": instance}, CREDENTIALS, wanted, on_progress=told.append)
        )
        while not task.done() and not all(rank.num_followers for rank in ranks):
            await asyncio.sleep(0.01)
        run()
        trace = await task
        assert told[-1].num_tokens == trace.tokens_N.sum()
        assert told[-1].num_rows == trace.num_rows
        return trace


async def test_ranks_add_up_pass_by_pass(ranks: list[CountedRank]) -> None:
    def run() -> None:
        for number in range(3):
            ranks[0].step({(1, 0): 2, (1, 1): 2, (2, 3): 4})
            ranks[1].step({(1, 0): 1, (1, 7): 1 + 2 * number, (2, 3): 2 + 2 * number})

    trace = await recorded(ranks, Wanted(num_windows=3), run)
    assert (trace.role, trace.model_name, trace.top_k) == ("decode", "tiny", 2)
    assert (trace.hidden_size, trace.num_draft_layers) == (TINY["hidden_size"], 0)
    assert trace.counts_NLE.shape == (3, 2, EXPERTS)
    assert trace.counts_NLE[:, 0, 0].tolist() == [3, 3, 3]
    assert trace.counts_NLE[:, 0, 7].tolist() == [1, 3, 5]
    assert trace.counts_NLE[:, 1, 3].tolist() == [6, 8, 10]
    assert trace.tokens_N.tolist() == [3, 4, 5]


async def test_passes_that_one_rank_was_not_followed_in_are_left_out(
    ranks: list[CountedRank],
) -> None:
    ranks[0].step({(1, 0): 9})
    ranks[1].step({(1, 0): 9})

    def run() -> None:
        for rank in ranks:
            for _ in range(5):
                rank.step({(1, 5): 2, (2, 5): 2})

    trace = await recorded(ranks, Wanted(num_windows=2, passes_per_window=2), run)
    assert trace.passes_per_row == 2
    assert np.array_equal(trace.counts_NLE.sum(axis=(0, 1)), [0, 0, 0, 0, 0, 32, 0, 0])
    assert trace.tokens_N.tolist() == [4, 4]


async def test_a_rank_that_is_not_in_the_pool_is_missed(ranks: list[CountedRank]) -> None:
    with pytest.raises(ClusterError, match=r"decode-0 has 2 ranks .* and 1 are in the"):
        await recorded(ranks, Wanted(), lambda: None, num_asked=1)


async def test_nothing_to_record_is_an_error(ranks: list[CountedRank]) -> None:
    with pytest.raises(ClusterError, match=r"fewer than 4 steps were made in 0\.5 s"):
        await recorded(ranks, Wanted(passes_per_window=4, seconds=0.5), lambda: None)


async def test_a_dense_model_is_named() -> None:
    async with listening(None) as address:
        instance = {
            "decode-0": [Rank(instance="decode-0", number=0, address=address, role=Callee.DECODE)]
        }
        with pytest.raises(ClusterError, match=r"decode-0/0 cannot be recorded: .*no experts"):
            await record(instance, CREDENTIALS, Wanted())


def member(role: Role) -> PoolMember:
    return PoolMember(
        epoch=1,
        role=role,
        address="127.0.0.1:1",
        num_requests_running=0,
        num_requests_waiting=0,
        num_free_blocks=0,
        num_total_blocks=0,
        draining=False,
    )


def test_instances_are_chosen_by_role_and_name() -> None:
    members = {
        ("decode-0", 1): member(Role.DECODE),
        ("decode-0", 0): member(Role.DECODE),
        ("decode-1", 0): member(Role.DECODE),
        ("prefill-0", 0): member(Role.PREFILL),
    }
    found = instances_to_record(members, Role.DECODE)
    assert {name: [rank.number for rank in ranks] for name, ranks in found.items()} == {
        "decode-0": [0, 1],
        "decode-1": [0],
    }
    assert list(instances_to_record(members, Role.DECODE, "decode-1")) == ["decode-1"]
    with pytest.raises(WrongArgumentError, match=r"'prefill-0' is in .* decode-0, decode-1"):
        instances_to_record(members, Role.DECODE, "prefill-0")
    with pytest.raises(WrongArgumentError, match="no prefill instance is in"):
        instances_to_record({}, Role.PREFILL)


@pytest.mark.parametrize(
    ("num_passes", "is_per_pass", "expected"),
    [(100, True, 1), (100, False, 25), (64, False, 32), (31, False, 31), (37, False, 1)],
)
def test_whole_rows_make_the_passes(num_passes: int, is_per_pass: bool, expected: int) -> None:
    assert passes_of_a_window(num_passes, is_per_pass=is_per_pass) == expected
