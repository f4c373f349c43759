"""Two versions side by side: of one wire number they serve together, of two they say why not."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from runtime.version import WIRE
from tests.integration.oracle_load import OracleLoad, make_loads
from tests.integration.other_tree import NEWER, SAME, UNNUMBERED, VERSION, TwoTrees
from tests.integration.test_drain import GRACE_S, drain_config, in_thread
from tests.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

NUM_TOKENS, NUM_STREAMS = 64, 4
OTHER_WIRE = {NEWER: WIRE + 1, UNNUMBERED: 0}


def get(url: str, data: bytes | None = None) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    headers = {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as told:
            return told.status, json.load(told)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def one_of_each() -> Any:
    config = drain_config()
    return dataclasses.replace(
        config,
        # A router that has just begun would wait for workers that it refuses.
        router=dataclasses.replace(config.router, worker_wait_s=0),
        prefill=dataclasses.replace(config.prefill, instances=1),
        decode=dataclasses.replace(config.decode, instances=1),
    )


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str, str], TwoTrees]]:
    """A router, a prefill worker and a decode worker, of which one role is of another tree."""
    clusters: list[TwoTrees] = []

    def start(kind: str, role: str) -> TwoTrees:
        cluster = TwoTrees(
            one_of_each(), tmp_path, kind=kind, is_other=lambda name: name.startswith(role)
        )
        clusters.append(cluster)
        cluster.write_config()
        cluster.start_router(0)
        wait_until(lambda: cluster.status() is not None, "the router answers", 300)
        for of_role in ("prefill", "decode"):
            cluster.start_instance(of_role, 0)
        return cluster

    yield start
    for cluster in clusters:
        cluster.stop()
        assert cluster.marked_processes() == []


@pytest.mark.parametrize("kind", [NEWER, UNNUMBERED])
@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_another_wire_number_is_refused_by_name_and_nobody_hangs(
    started: Callable[[str, str], TwoTrees], kind: str, role: str
) -> None:
    cluster = started(kind, role)
    refused = ["prefill", "decode"] if role == "router" else [role]
    for of_role in refused:
        cluster.wait_exit(f"{of_role}-0/0", 300)
        said = cluster.log_tail(f"{of_role}-0/0")
        # An unnumbered worker has the router's word for it; one that meets such a router its own.
        assert f"speaks wire {OTHER_WIRE[kind]} (Tandem " in said or (
            role == "router" and f"speaks wire {WIRE} (Tandem " in said
        )
        assert f"wire {WIRE} (Tandem " in said
        assert "Fix: one version of Tandem on both" in said
    others = {"prefill", "decode"} - set(refused)
    wait_until(
        lambda: {one["role"] for one in (cluster.status() or {"workers": []})["workers"]} == others,
        "only those that fit are in the pool",
        300,
    )
    status, body = get(f"{cluster.base_url}/ready")
    assert status == 503
    if (kind, role) != (UNNUMBERED, "router"):
        for of_role in refused:
            theirs = WIRE if role == "router" else OTHER_WIRE[kind]
            named = [line for line in body["missing"] if f"worker {of_role}-0/0 speaks" in line]
            assert len(named) == 1, body
            assert f"speaks wire {theirs} (Tandem " in named[0]
    asked = json.dumps({"model": "tandem-python", "prompt": [300, 301], "max_tokens": 2}).encode()
    status, body = get(f"{cluster.base_url}/v1/completions", asked)
    assert status == 503, body


def test_workers_say_why_a_router_of_another_number_does_not_have_them(
    tmp_path: Path, oracle: DeepseekV3ForCausalLM
) -> None:
    def failing(url: str) -> bool:
        status, body = get(f"http://{url}/health")
        return status == 503 and f"this process wire {WIRE + 1}" in body["parts"]["registration"]

    with TwoTrees(one_of_each(), tmp_path, kind=NEWER, is_other=lambda _: False) as cluster:
        (load,) = make_loads([cluster.base_url], oracle, num_prompts=4, num_tokens=8)
        asyncio.run(load.run(4, 2))
        status = cluster.status()
        assert status is not None
        urls = [worker["metrics_address"] for worker in status["workers"]]
        cluster.is_other = lambda name: name == "router"
        cluster.replace_router(0)
        for url in urls:
            wait_until(lambda url=url: failing(url), f"{url} says why", 300)
        cluster.is_other = lambda _: False
        cluster.replace_router(0)
        cluster.wait_workers(2)
        assert [get(f"http://{url}/health")[0] for url in urls] == [200, 200]
        asyncio.run(load.run(4, 2))
        assert load.wrong == []
        cluster.wait_idle()


def test_no_stream_notices_an_upgrade_to_another_version_of_the_same_number(
    tmp_path: Path, oracle: DeepseekV3ForCausalLM
) -> None:
    """Workers one after the other, so that each old one pairs with each new one; then routers."""
    upgraded: set[str] = set()

    async def upgrade_workers(cluster: TwoTrees, streams: OracleLoad) -> None:
        async with streams.under_way(NUM_STREAMS):
            for role, index in (("decode", 0), ("prefill", 0), ("decode", 1), ("prefill", 1)):
                await streams.some_more(NUM_STREAMS)
                upgraded.add(f"{role}-{index}/0")
                await in_thread(cluster.terminate, f"{role}-{index}")
                await in_thread(cluster.start_instance, role, index)
                await in_thread(cluster.wait_workers, 4)
            await streams.some_more(2 * NUM_STREAMS)

    async def upgrade_router(cluster: TwoTrees, index: int, streams: OracleLoad) -> None:
        upgraded.add(f"router-{index}" if index else "router")
        async with streams.under_way(NUM_STREAMS):
            await in_thread(cluster.replace_router, index)
            await streams.some_more(2 * NUM_STREAMS)
            version = await asyncio.to_thread(version_at, cluster.base_urls[index])
            assert version == VERSION

    def version_at(url: str) -> str:
        wait_until(lambda: cluster.status(url) is not None, f"{url} answers", 300)
        return str(get(f"{url}/version")[1]["version"])

    config = drain_config()
    config = dataclasses.replace(config, router=dataclasses.replace(config.router, instances=2))
    cluster = TwoTrees(
        config,
        tmp_path,
        kind=SAME,
        is_other=lambda name: name in upgraded,
        modules={"decode": "tests.integration.slow_decode"},
        grace_s=GRACE_S,
    )
    with cluster:
        workers, first, second = make_loads(
            [cluster.base_urls[0], *cluster.base_urls],
            oracle,
            num_prompts=8,
            num_tokens=NUM_TOKENS,
        )
        assert version_at(first.base_url) != VERSION
        asyncio.run(upgrade_workers(cluster, workers))
        asyncio.run(upgrade_router(cluster, 1, first))
        asyncio.run(upgrade_router(cluster, 0, second))
        assert workers.wrong + first.wrong + second.wrong == []
        assert upgraded == set(cluster.processes)
        cluster.wait_workers(4)
        cluster.wait_idle()
    assert cluster.marked_processes() == []
