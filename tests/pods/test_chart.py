"""The Helm chart, run: what it renders for the bundled model on CPUs serves, scales and is tested.

The manifests are those of the profile cpu-demo, but for numbers that keep the test short: fewer
seconds between probes, and before routers and workers end.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helm.rendering import merged, profile, render
from tests.integration.client import complete, stream
from tests.pods.cluster import PodCluster
from tests.pods.manifests import Manifests
from tests.pods.network import why_not

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON or "can be run"),
    pytest.mark.timeout(900),
]

NAME = "demo"
NAMESPACE = "serving"
DECODE, PREFILL = f"{NAME}-tandem-decode", f"{NAME}-tandem-prefill"
ROUTER = f"{NAME}-tandem-router"
MODEL = "tandem-python"
NUM_LANES = 3
NUM_TOKENS = 32
VALUES = {
    "router": {"preStopSeconds": 1, "drainSeconds": 20},
    "prefill": {"drainSeconds": 5},
    "decode": {"drainSeconds": 5},
}
PERIOD_S = 0.5


def rendered(**values: Any) -> list[dict[str, Any]]:
    """The profile's manifests, with values over it."""
    release = render(merged(profile("cpu-demo"), VALUES, values), name=NAME, namespace=NAMESPACE)
    objects = copy.deepcopy([*release.manifests, *release.hooks])
    for one in objects:
        if one["kind"] in ("Deployment", "StatefulSet"):
            for container in one["spec"]["template"]["spec"]["containers"]:
                hurry(container)
    return objects


def hurry(container: dict[str, Any]) -> None:
    """Probe often; as many seconds as before until a container has failed."""
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe := container.get(kind):
            failures = probe["failureThreshold"] * probe["periodSeconds"]
            probe["failureThreshold"] = round(failures / PERIOD_S)
            probe["periodSeconds"] = PERIOD_S


def cluster_of(objects: list[dict[str, Any]], folder: Path) -> PodCluster:
    return PodCluster(Manifests.of(objects, NAMESPACE), folder)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodCluster]:
    with cluster_of(rendered(), tmp_path_factory.mktemp("demo")) as cluster:
        cluster.wait_ready()
        yield cluster
        assert cluster.events() == []


@dataclass(slots=True)
class Load:
    """Streams one after the other in several lanes, until they are told that it is enough."""

    url: str
    num_whole: int = 0
    failed: list[str] = field(default_factory=list)
    _is_over: bool = False

    @contextlib.asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """Streams come and go in the block; on its end all are over."""
        timeout = aiohttp.ClientTimeout(total=300)
        async with (
            aiohttp.ClientSession(self.url, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for lane in range(NUM_LANES):
                group.create_task(self._lane(session, lane))
            try:
                yield
            finally:
                self._is_over = True

    async def some_more(self, count: int = NUM_LANES) -> None:
        """Wait until so many more are over."""
        target = self.num_whole + count
        async with asyncio.timeout(240):
            while self.num_whole < target:
                assert self.failed == []
                await asyncio.sleep(0.05)

    async def _lane(self, session: aiohttp.ClientSession, lane: int) -> None:
        number = 0
        while not self._is_over:
            number += 1
            try:
                answer = await stream(
                    session,
                    f"def lane_{lane}_{number}(value):",
                    model=MODEL,
                    max_tokens=NUM_TOKENS,
                    ignore_eos=True,
                    temperature=0,
                )
            except (aiohttp.ClientError, AssertionError) as error:
                self.failed.append(repr(error))
                return
            if answer.error is None and len(answer.token_ids) == NUM_TOKENS:
                self.num_whole += 1
            else:
                self.failed.append(f"{answer.request_id}: {answer.error}")


async def in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    """While the streams go on."""
    return await asyncio.to_thread(work, *arguments)


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
    assert "unrecognized arguments: --no-such-flag=1" in str(caught.value)


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
