"""Two routers in front of the same workers: each may die, and the other does not notice."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import aiohttp
import pytest

from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
    RouterSection,
)
from tests.integration.client import stream
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR
from tests.integration.oracle_load import OracleLoad, make_loads
from tests.waiting import wait_until

NUM_LANES = 4
NUM_TOKENS = 32


def two_routers() -> ClusterConfig:
    return ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        router=RouterSection(instances=2, lease_ttl_s=3.0),
        prefill=PrefillSection(num_blocks=128),
        decode=DecodeSection(num_blocks=192, max_num_seqs=16),
        kv_transfer=KVTransferSection(transport="loopback"),
    )


async def ask_until_answered(base_urls: list[str], load: OracleLoad, which: int) -> int:
    """What a client behind a load balancer does; how often its connection broke."""
    for num_broken, base_url in enumerate(itertools.cycle(base_urls)):
        try:
            async with aiohttp.ClientSession(base_url) as session:
                answer = await stream(
                    session,
                    load.prompts[which],
                    model="tandem-python",
                    max_tokens=NUM_TOKENS,
                    ignore_eos=True,
                    temperature=0,
                )
        except aiohttp.ClientError:
            continue
        assert answer.error is None
        assert answer.token_ids == load.expected[which]
        return num_broken
    raise AssertionError("unreachable")


def limit_at(cluster: Cluster, base_url: str) -> int:
    status = cluster.status(base_url)
    return 0 if status is None else int(status["max_requests_in_flight"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_router_that_is_killed_costs_the_others_nothing(
    tmp_path: Path, oracle: DeepseekV3ForCausalLM
) -> None:
    modules = {"decode": "tests.integration.slow_decode"}
    with Cluster(two_routers(), tmp_path, modules=modules) as cluster:
        killed, other = cluster.base_urls
        (steady,) = make_loads([other], oracle, num_prompts=8, num_tokens=NUM_TOKENS)
        whole = 48  # three quarters of the places: four times max_num_seqs
        wait_until(lambda: limit_at(cluster, other) == whole // 2, "each has its half")

        async def disturb() -> list[int]:
            async with steady.under_way(NUM_LANES):
                await steady.some_more(1)
                clients = [
                    asyncio.create_task(ask_until_answered([killed, other], steady, which))
                    for which in range(NUM_LANES)
                ]
                while (await in_flight(cluster, killed)) < NUM_LANES:
                    await asyncio.sleep(0.02)
                await asyncio.to_thread(cluster.kill, "router")
                broken = await asyncio.gather(*clients)
                await steady.some_more(2 * NUM_LANES)
                return broken

        assert asyncio.run(disturb()) == [1] * NUM_LANES
        assert steady.wrong == []
        wait_until(lambda: limit_at(cluster, other) == whole, "it has all places")
        cluster.start_router(0)
        wait_until(lambda: limit_at(cluster, killed) == whole // 2, "it is back")
        cluster.wait_workers(2)
        assert asyncio.run(ask_until_answered([killed], steady, 0)) == 0
        cluster.wait_idle()
    assert cluster.marked_processes() == []


async def in_flight(cluster: Cluster, base_url: str) -> int:
    status = await asyncio.to_thread(cluster.status, base_url)
    return 0 if status is None else int(status["num_requests_in_flight"])
