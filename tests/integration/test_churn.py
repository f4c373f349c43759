"""Streams while workers are killed and the network is cut: none is lost, none has another text.

The long ones are `make soak`, a short one belongs to `make test`. Those with churn first run the
same kind of requests undisturbed, and print both and what a migration costs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from kv_transfer.sender_commands import LaneOptions
from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
    RouterSection,
)
from tests.integration.churn import Churn, LinkedCluster, linked_cluster, why_no_network
from tests.integration.client import Completion, stream
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR
from tests.integration.oracle_load import make_loads

NUM_DISTINCT = 32
NUM_TOKENS = 48
CONCURRENCY = 24
NUM_KILLS = 100
NUM_AROUND_TOKENS = 12


def churn_config() -> ClusterConfig:
    return ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        router=RouterSection(lease_ttl_s=3.0, max_migrations=20, worker_wait_s=120.0),
        prefill=PrefillSection(instances=2, num_blocks=128),
        decode=DecodeSection(instances=2, num_blocks=192),
        kv_transfer=KVTransferSection(transport="loopback"),
    )


def router_samples(base_url: str, prefix: str) -> dict[str, float]:
    """The router's samples whose name begins so."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(prefix))
    return {name: float(value) for name, value in pairs}


def run_churn(
    folder: Path,
    oracle: DeepseekV3ForCausalLM,
    *,
    num_undisturbed: int,
    num_requests: int,
    decode_every_s: float,
    prefill_every_s: float,
    cut_every_s: float,
) -> None:
    cluster = LinkedCluster(churn_config(), folder)
    with linked_cluster(cluster) as link:
        idle, load = make_loads(
            [cluster.base_url] * 2, oracle, num_prompts=NUM_DISTINCT, num_tokens=NUM_TOKENS
        )
        asyncio.run(idle.run(num_undisturbed, CONCURRENCY))
        begun = time.monotonic()
        with Churn(
            cluster,
            link,
            decode_every_s=decode_every_s,
            prefill_every_s=prefill_every_s,
            cut_every_s=cut_every_s,
        ) as churn:
            asyncio.run(load.run(num_requests, CONCURRENCY))
        elapsed_s = time.monotonic() - begun
        cluster.wait_idle(120.0)
        samples = router_samples(cluster.base_url, "pd_router_migration")
        figures = {
            "requests": num_requests,
            "seconds": round(elapsed_s, 1),
            "lost": len(load.lost),
            "different": len(load.different),
            "happened": dict(churn.counts),
            "no network cuts": why_no_network(),
            "undisturbed p50, p99 s": [round(idle.quantile(q), 2) for q in (0.5, 0.99)],
            "disturbed p50, p99 s": [round(load.quantile(q), 2) for q in (0.5, 0.99)],
            "migrations": {k: v for k, v in samples.items() if "_bucket" not in k},
        }
        print(f"\nchurn: {json.dumps(figures, indent=1)}\n")
        assert idle.wrong == []
        assert load.lost == []
        assert load.different == []
        assert churn.counts["decode killed"] >= 1
    assert cluster.marked_processes() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_stream_is_lost_while_workers_die(
    tmp_path: Path, oracle: DeepseekV3ForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        run_churn(
            tmp_path,
            oracle,
            num_undisturbed=24,
            num_requests=120,
            decode_every_s=6.0,
            prefill_every_s=14.0,
            cut_every_s=9.0,
        )


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_2000_requests_while_workers_die_and_the_network_is_cut(
    tmp_path: Path, oracle: DeepseekV3ForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        run_churn(
            tmp_path,
            oracle,
            num_undisturbed=100,
            num_requests=2000,
            decode_every_s=10.0,
            prefill_every_s=25.0,
            cut_every_s=40.0,
        )


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_hundred_kills_of_decode_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Small posts and large ones are on their way at each: 16 streams of prompts of any length."""
    transfer = KVTransferSection(transfer_timeout_s=10.0)
    # What a transfer may take, and what a connection may take to drain behind that.
    limit_s = transfer.transfer_timeout_s + LaneOptions().drain_timeout_s
    config = dataclasses.replace(churn_config(), kv_transfer=transfer)
    draw, waits = random.Random(30), []
    with Cluster(config, tmp_path) as cluster:
        for _ in range(NUM_KILLS):
            victim = draw.randrange(2)
            num_before = draw.randrange(0, 32)

            def restart(victim: int = victim) -> None:
                cluster.kill(f"decode-{victim}/0")
                cluster.start_instance("decode", victim)

            answers = asyncio.run(streams_around(cluster, draw, num_before, restart))
            assert [one.error for one in answers] == [None] * len(answers)
            assert all(len(one.token_ids) == NUM_AROUND_TOKENS for one in answers)
            ended = time.monotonic()
            cluster.wait_idle(limit_s)
            waits.append(time.monotonic() - ended)
            cluster.wait_workers(4)
        with capsys.disabled():
            print(f"\n{NUM_KILLS} kills: idle at most {max(waits):.2f} s behind the last stream")


async def streams_around(
    cluster: Cluster, draw: random.Random, num_before: int, act: Callable[[], None]
) -> list[Completion]:
    """Keep 16 streams going until so many have ended, act, and let the last ones end."""
    answers: list[Completion] = []
    is_over = False

    async def follow(session: aiohttp.ClientSession) -> None:
        while not is_over:
            length = draw.randrange(20, 700)
            prompt = [draw.randrange(300, 4000) for _ in range(length)]
            answers.append(
                await stream(
                    session,
                    prompt,
                    model="tandem-python",
                    max_tokens=NUM_AROUND_TOKENS,
                    ignore_eos=True,
                )
            )

    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(cluster.base_url, connector=connector) as session,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(follow(session)) for _ in range(16)]
        while len(answers) < num_before and not any(task.done() for task in tasks):
            await asyncio.sleep(0.002)
        await asyncio.to_thread(act)
        is_over = True
    return answers
