"""The bench of followed caches: the same requests with and without followers, who hear of all."""

from __future__ import annotations

import pytest

from bench.engine.cache_events import NUM_BLOCKS, SHAPES, Traffic, measure
from engine.memory.block_pool import BlockPool

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("role", SHAPES)
async def test_followers_hear_of_the_same_steps(role: str) -> None:
    costs = [await measure(role, followers, 20, 0.001) for followers in (0, 2)]
    assert costs[0].events == costs[1].events > 0
    assert costs[0].frames == 0
    assert costs[1].frames >= 2 * 2  # each has a dump at least, and events
    assert costs[1].start_us > 0


@pytest.mark.parametrize("role", SHAPES)
def test_a_full_cache_evicts_as_much_as_it_stores(role: str) -> None:
    pool = BlockPool(NUM_BLOCKS + 1, 64)
    traffic = Traffic(pool, SHAPES[role])
    for _ in range(2000):
        traffic.step()
    pool.check_integrity()
    before, cached = traffic.num_events, pool.num_cached_blocks
    for _ in range(200):
        traffic.step()
    assert pool.num_cached_blocks == pytest.approx(cached, abs=200)
    assert traffic.num_events > before
    assert pool.num_free_blocks > 0
