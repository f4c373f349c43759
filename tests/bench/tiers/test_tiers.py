"""Tiers under overload, by the real queues in virtual time: targets kept, and nothing lost."""

from __future__ import annotations

import asyncio

import pytest

from bench.tiers.command import MIX, TierRow, Window, rows_of, simulate, tiers_of
from bench.tiers.load import Mix
from bench.tiers.virtual_loop import run_virtually

pytestmark = pytest.mark.nightly

LOAD = 1.5
WINDOW = Window(since=8.0, until=24.0)
LOAD_MIX = Mix(per_tier=MIX, output=(32, 256))
TIERS = tiers_of([50.0, 70.0, 0.0])


def measured(*, has_tiers: bool) -> tuple[float, dict[str, TierRow]]:
    """Output tokens per second, and a row for each tier."""
    run = simulate(TIERS, load=LOAD, window=WINDOW, mix=LOAD_MIX, has_tiers=has_tiers)
    rows = rows_of(run, TIERS, load=LOAD, window=WINDOW, mix=LOAD_MIX)
    return run.tokens_per_s(WINDOW.since, WINDOW.until), {row.tier: row for row in rows}


@pytest.fixture(scope="module")
def with_tiers() -> tuple[float, dict[str, TierRow]]:
    return measured(has_tiers=True)


@pytest.fixture(scope="module")
def without() -> tuple[float, dict[str, TierRow]]:
    return measured(has_tiers=False)


def test_the_first_tier_keeps_its_targets_at_half_as_much_again_as_the_pair_can_do(
    with_tiers: tuple[float, dict[str, TierRow]], without: tuple[float, dict[str, TierRow]]
) -> None:
    best = with_tiers[1]["max"]
    assert best.num_requests > 50
    assert best.both_met >= 0.99
    assert without[1]["max"].both_met < 0.9, "else the load is no overload"


def test_as_many_tokens_go_through_as_without_tiers(
    with_tiers: tuple[float, dict[str, TierRow]], without: tuple[float, dict[str, TierRow]]
) -> None:
    assert with_tiers[0] >= 0.95 * without[0]


def test_the_last_tier_goes_on_by_its_share(
    with_tiers: tuple[float, dict[str, TierRow]],
) -> None:
    last = with_tiers[1]["base"]
    assert last.num_ended >= 0.1 * last.num_requests


def test_a_run_is_the_same_every_time(with_tiers: tuple[float, dict[str, TierRow]]) -> None:
    assert measured(has_tiers=True) == with_tiers


def test_virtual_time_passes_at_once_and_in_order() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        moments: list[float] = []
        for delay_s in (3600.0, 1.0, 60.0):
            loop.call_later(delay_s, lambda: moments.append(loop.time()))
        await asyncio.sleep(7200.0)
        return [*moments, loop.time()]

    assert run_virtually(main()) == pytest.approx([1.0, 60.0, 3600.0, 7200.0])


def test_a_model_that_is_stuck_says_so() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="stuck"):
        run_virtually(main())
