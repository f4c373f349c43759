"""The Helm chart, run: what it renders for the bundled model on CPUs serves, scales and is tested.

The manifests are those of the profile cpu-demo, but for numbers that keep the test short: fewer
seconds between probes, and before routers and workers end.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helm.rendering import merged, profile
from tests.integration.client import complete
from tests.pods.chart import (
    DECODE,
    MODEL,
    NUM_LANES,
    PREFILL,
    ROUTER,
    Load,
    cluster_of,
    in_thread,
    release_of,
)
from tests.pods.cluster import PodCluster
from tests.pods.network import why_not

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON or "can be run"),
    pytest.mark.timeout(900),
]

VALUES = {
    "router": {"preStopSeconds": 1, "drainSeconds": 20},
    "prefill": {"drainSeconds": 5},
    "decode": {"drainSeconds": 5},
}


def rendered(**values: Any) -> list[dict[str, Any]]:
    """The profile's manifests, with values over it."""
    return release_of(merged(profile("cpu-demo"), VALUES, values))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodCluster]:
    with cluster_of(rendered(), tmp_path_factory.mktemp("demo")) as cluster:
        cluster.wait_ready()
        yield cluster
        assert cluster.events() == []


def states(cluster: PodCluster) -> dict[str, str]:
    """What the router says of each worker."""

    async def ask() -> dict[str, str]:
        async with (
            aiohttp.ClientSession(cluster.url(ROUTER)) as session,
            session.get("/status") as answer,
        ):
            workers = (await answer.json())["workers"]
            return {one["instance"]: one["state"] for one in workers}

    return asyncio.run(ask())


@pytest.mark.slow
def test_the_chart_s_own_test_passes(demo: PodCluster) -> None:
    status, said = demo.run_test()
    assert status == 0, said
    assert f"{MODEL}: 16 tokens through prefill and decode" in said


@pytest.mark.slow
def test_a_completion_goes_through_pods_of_both_roles(demo: PodCluster) -> None:
    async def ask() -> None:
        async with aiohttp.ClientSession(demo.url(ROUTER)) as session:
            answer = await complete(
                session, "def fibonacci(n):", model=MODEL, max_tokens=8, temperature=0
            )
            assert (answer.error, answer.status) == (None, 200)

    asyncio.run(ask())
    assert set(states(demo)) == {f"{PREFILL}-0", f"{DECODE}-0"}


@pytest.mark.slow
def test_decode_is_scaled_up_and_down_and_no_request_fails(demo: PodCluster) -> None:
    async def scale() -> Load:
        load = Load(demo.url(ROUTER))
        async with load.under_way():
            await load.some_more()
            demo.scale(DECODE, 2)
            await in_thread(demo.wait_ready)
            assert f"{DECODE}-1" in await in_thread(states, demo)
            await load.some_more(2 * NUM_LANES)
            demo.scale(DECODE, 1)
            await in_thread(demo.wait_ready)
            assert f"{DECODE}-1" not in await in_thread(states, demo)
            await load.some_more()
        return load

    load = asyncio.run(scale())
    assert load.failed == []
    (gone,) = [pod for pod in demo.node.former if pod.name == f"{DECODE}-1"]
    assert gone.states[0].last_end == "exited 0", gone.log()


@pytest.mark.soak
def test_pods_of_both_roles_are_replaced_one_by_one_and_no_request_fails(tmp_path: Path) -> None:
    objects = rendered(prefill={"replicas": 2}, decode={"replicas": 2})
    with cluster_of(objects, tmp_path) as cluster:
        cluster.wait_ready()

        async def roll() -> Load:
            load = Load(cluster.url(ROUTER))
            async with load.under_way():
                await load.some_more()
                for owner in (DECODE, PREFILL):
                    for number in (1, 0):
                        await in_thread(cluster.delete_pod, f"{owner}-{number}")
                        await in_thread(cluster.wait_ready)
                        await load.some_more()
            return load

        assert asyncio.run(roll()).failed == []
        assert cluster.events() == []


@pytest.mark.soak
def test_a_second_router_serves_where_the_first_is_deleted(tmp_path: Path) -> None:
    with cluster_of(rendered(router={"replicas": 2}), tmp_path) as cluster:
        cluster.wait_ready()

        async def lose_one() -> Load:
            load = Load(cluster.url(ROUTER))
            async with load.under_way():
                await load.some_more()
                for pod in cluster.pods_of(ROUTER):
                    await in_thread(cluster.delete_pod, pod.name)
                    await in_thread(cluster.wait_ready)
                    await load.some_more()
            return load

        assert asyncio.run(lose_one()).failed == []


@pytest.mark.soak
def test_a_worker_that_is_killed_is_started_again_in_its_pod(tmp_path: Path) -> None:
    with cluster_of(rendered(decode={"replicas": 2}), tmp_path) as cluster:
        cluster.wait_ready()

        async def kill() -> Load:
            load = Load(cluster.url(ROUTER))
            async with load.under_way():
                await load.some_more()
                (pod,) = [one for one in cluster.pods_of(DECODE) if one.name == f"{DECODE}-1"]
                cluster.signal(pod, signal.SIGKILL)
                while pod.states[0].num_restarts == 0:
                    await asyncio.sleep(0.05)
                await in_thread(cluster.wait_ready)
                await load.some_more(2 * NUM_LANES)
            return load

        assert asyncio.run(kill()).failed == []


def broken(objects: list[dict[str, Any]], change: Callable[[dict[str, Any]], None]) -> None:
    """Change the decode worker's container."""
    for one in objects:
        if one["metadata"]["name"] == DECODE and one["kind"] == "StatefulSet":
            change(one["spec"]["template"]["spec"]["containers"][0])


@pytest.mark.slow
def test_a_wrong_flag_in_the_chart_fails_with_its_reason(tmp_path: Path) -> None:
    objects = rendered()
    broken(objects, lambda container: container["args"].append("--no-such-flag=1"))
    alone = [one for one in objects if one["metadata"]["name"] != PREFILL]
    alone = [one for one in alone if one["metadata"]["name"] != ROUTER]
    with pytest.raises(AssertionError) as caught, cluster_of(alone, tmp_path) as cluster:
        cluster.wait_ready()
    assert f"{DECODE}-0 cannot be run" in str(caught.value)
    assert "`tandem worker` takes no --no-such-flag=1" in str(caught.value)


@pytest.mark.soak
def test_a_probe_of_a_port_that_nobody_has_fails_with_its_reason(tmp_path: Path) -> None:
    objects = rendered()

    def change(container: dict[str, Any]) -> None:
        container["startupProbe"] |= {"failureThreshold": 4}
        container["startupProbe"]["httpGet"]["port"] = 8081

    broken(objects, change)
    with pytest.raises(AssertionError) as caught, cluster_of(objects, tmp_path) as cluster:
        cluster.wait_ready()
    assert "is killed, startup probe" in str(caught.value)
