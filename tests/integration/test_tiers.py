"""Two tiers in real processes under overload: who came last and goes first ends first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from runtime.config import ClusterConfig, DecodeSection, ModelSection, TierSection
from tests.integration.client import stream
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
NUM_SEQS = 2
"""Places of a decode step: the rank takes on four times as many, the router lets in six."""
NUM_BASE = 7
NUM_BEST = 2


async def overload(cluster: Cluster) -> list[str]:
    """Fill all places and queues with the last tier, then come with the first: who ends when."""
    ended: list[str] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(cluster.base_url, connector=connector) as session:

        async def ask(tier: str, number: int, num_tokens: int) -> None:
            answer = await stream(
                session,
                [300 + number] * 40,
                model="tandem-python",
                service_tier=tier,
                max_tokens=num_tokens,
                ignore_eos=True,
                temperature=0,
            )
            assert answer.error is None, answer.error
            assert len(answer.token_ids) == num_tokens
            ended.append(tier)

        async with asyncio.TaskGroup() as group:
            for number in range(NUM_BASE):
                group.create_task(ask("base", number, 240))
            async with asyncio.timeout(300):
                while not await is_full(session):
                    await asyncio.sleep(0.05)
            for number in range(NUM_BASE, NUM_BASE + NUM_BEST):
                group.create_task(ask("max", number, 8))
    return ended


async def is_full(session: aiohttp.ClientSession) -> bool:
    """Whether requests wait at the router, and in decode for a place of its steps."""
    async with session.get("/status") as response:
        status = await response.json()
    loads = [worker["load"] for worker in status["workers"] if worker["role"] == "decode"]
    num_running = sum(load["num_requests_running"] for load in loads)
    return status["num_requests_waiting"] > 0 and num_running == NUM_SEQS


def test_the_first_tier_ends_before_all_that_the_last_has_queued(tmp_path: Path) -> None:
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        decode=DecodeSection(max_num_seqs=NUM_SEQS),
        tiers=(
            TierSection(name="max", ttft_ms=200.0, open=True),
            TierSection(name="base", order=1),
        ),
    )
    with Cluster(config, tmp_path / "cluster") as cluster:
        ended = asyncio.run(overload(cluster))
        assert sorted(ended) == ["base"] * NUM_BASE + ["max"] * NUM_BEST
        last = max(index for index, tier in enumerate(ended) if tier == "max")
        num_before = ended[:last].count("base")
        assert num_before <= NUM_SEQS, f"only those that ran already may end before: {ended}"
        cluster.wait_idle()
    assert cluster.marked_processes() == []
