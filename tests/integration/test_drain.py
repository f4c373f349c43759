"""Instances of either role that are told to stop or to drain under load: no stream notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.drain import drain_ranks, ranks_of
from deploy.views.pool_watch import fetch_members
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
    RouterSection,
)
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR
from tests.integration.oracle_load import OracleLoad, make_loads
from tests.integration.test_faults import num_migrations

NUM_TOKENS = 64
NUM_PROMPTS = 8
NUM_STREAMS = 8
"""At any time."""
GRACE_S = 1.0
"""Steps of 40 ms need 2.5 s for 64 tokens: a stream that is not in its last third has to move."""


def drain_config() -> ClusterConfig:
    return ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        router=RouterSection(worker_wait_s=120.0),
        prefill=PrefillSection(instances=2, num_blocks=128, max_num_batched_tokens=64),
        decode=DecodeSection(instances=2, num_blocks=192),
        kv_transfer=KVTransferSection(transport="loopback"),
    )


def slow_cluster(config: ClusterConfig, folder: Path) -> Cluster:
    modules = {"decode": "tests.integration.slow_decode"}
    return Cluster(config, folder, modules=modules, grace_s=GRACE_S)


async def in_thread(work: Callable[..., None], *arguments: object) -> None:
    """While the streams go on."""
    await asyncio.to_thread(work, *arguments)


async def drain(cluster: Cluster, instance: str, deadline_s: float) -> None:
    """What `tandem drain` does, until the instance is empty."""
    members = await fetch_members(
        cluster.control_address, cluster.base_url, cluster.credentials, timeout_s=30
    )
    ranks = ranks_of(instance, members)
    outcome = await drain_ranks(ranks, cluster.credentials, deadline_s=deadline_s)
    assert outcome.is_empty, outcome


def states_of(cluster: Cluster, instance: str) -> set[str]:
    status = cluster.status()
    assert status is not None
    return {one["state"] for one in status["workers"] if one["instance"] == instance}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_stream_notices_a_rolling_update_and_a_drain(
    tmp_path: Path, oracle: DeepseekV3ForCausalLM
) -> None:
    async def roll(cluster: Cluster, streams: OracleLoad) -> None:
        async with streams.under_way(NUM_STREAMS):
            await streams.some_more(NUM_STREAMS)
            for role in ("decode", "prefill"):
                await in_thread(cluster.terminate, f"{role}-0")
                await in_thread(cluster.start_instance, role, 0)
                await in_thread(cluster.wait_workers, 4)
                await streams.some_more(NUM_STREAMS)
            await drain(cluster, "decode-1", GRACE_S)
            await streams.some_more(NUM_STREAMS)
            assert states_of(cluster, "decode-1") == {"draining"}
            assert cluster.metric("decode-1", "pd_decode_num_requests") == 0

    with slow_cluster(drain_config(), tmp_path) as cluster:
        (streams,) = make_loads(
            [cluster.base_url], oracle, num_prompts=NUM_PROMPTS, num_tokens=NUM_TOKENS
        )
        asyncio.run(roll(cluster, streams))
        assert streams.wrong == []
        assert num_migrations(cluster, "draining") > 0
        cluster.wait_idle()
    assert cluster.marked_processes() == []
