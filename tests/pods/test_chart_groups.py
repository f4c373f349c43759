"""The chart's decode worker over several hosts, run: a LeaderWorkerSet whose pods share the ranks.

The values are those of the profile h200-ep16, but for what CPUs and the bundled model ask for.
"""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from deploy.certificates import make_certificates
from tests.helm.rendering import Values, merged, profile
from tests.pods.chart import (
    DECODE,
    MODEL,
    NAMESPACE,
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

SMALL = {"device": "cpu", "max_num_seqs": 8, "num_blocks": 96}
POD = {"startupSeconds": 300, "rdma": {"resource": "", "count": 0}, "drainSeconds": 5}
VALUES: Values = {
    "model": {"source": "bundled", "path": ""},
    "keys": {"existingSecret": "", "allowAnonymous": True},
    "config": {
        "model": {"dtype": "auto", "max_model_len": 2048},
        "router": {"http_processes": 1, "worker_wait_s": 150.0},
        "prefill": {**SMALL, "tp": 1, "max_num_batched_tokens": 512},
        "decode": {**SMALL, "dp": 2, "device_memory_gib": 0.0, "step_timeout_s": 10.0},
        "kv_transfer": {"transport": "loopback", "allow_open_data_ports": False},
    },
    "router": {"replicas": 1, "preStopSeconds": 1, "drainSeconds": 20},
    "prefill": POD,
    "decode": POD,
}


def rendered(*values: Values) -> list[dict[str, Any]]:
    """The profile's manifests, with values over it."""
    return release_of(merged(profile("h200-ep16"), VALUES, *values))


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodCluster]:
    with cluster_of(rendered(), tmp_path_factory.mktemp("groups")) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.mark.slow
def test_a_worker_of_two_pods_serves(groups: PodCluster) -> None:
    assert [pod.name for pod in groups.pods_of(DECODE)] == [f"{DECODE}-0", f"{DECODE}-0-1"]
    assert groups.num_recreated(DECODE) == 0, groups.describe()
    status, said = groups.run_test()
    assert status == 0, said
    assert f"{MODEL}: 16 tokens through prefill and decode" in said
    workers = asyncio.run(workers_of(groups))
    ips = [pod.place.facts.ip for pod in groups.pods_of(DECODE)]
    assert workers == {
        (f"{PREFILL}-0", 0): groups.pods_of(PREFILL)[0].place.facts.ip,
        (f"{DECODE}-0", 0): ips[0],
        (f"{DECODE}-0", 1): ips[1],
    }


async def workers_of(cluster: PodCluster) -> dict[tuple[str, int], str]:
    """The host of each rank that the router knows."""
    async with (
        aiohttp.ClientSession(cluster.url(ROUTER)) as session,
        session.get("/status") as answer,
    ):
        workers = (await answer.json())["workers"]
    return {(one["instance"], one["rank"]): one["address"].rpartition(":")[0] for one in workers}


@pytest.mark.nightly
@pytest.mark.parametrize("index", [0, 1], ids=["the leader", "the other"])
def test_a_pod_that_is_killed_takes_its_group_along_and_no_request_fails(
    groups: PodCluster, index: int
) -> None:
    async def kill() -> Load:
        load = Load(groups.url(ROUTER))
        count = groups.num_recreated(DECODE)
        async with load.under_way():
            await load.some_more()
            groups.signal(groups.pods_of(DECODE)[index], signal.SIGKILL)
            while groups.num_recreated(DECODE) == count:
                await asyncio.sleep(0.05)
            await in_thread(groups.wait_ready)
            await load.some_more(2 * NUM_LANES)
        assert groups.num_recreated(DECODE) == count + 1, groups.describe()
        return load

    assert asyncio.run(kill()).failed == []


@pytest.mark.nightly
def test_a_group_that_is_scaled_away_leaves_in_order(groups: PodCluster) -> None:
    async def scale() -> Load:
        load = Load(groups.url(ROUTER))
        async with load.under_way():
            await load.some_more()
            groups.scale(DECODE, 2)
            await in_thread(groups.wait_ready)
            await load.some_more(2 * NUM_LANES)
            groups.scale(DECODE, 1)
            await in_thread(groups.wait_ready)
            await load.some_more()
        return load

    assert asyncio.run(scale()).failed == []
    gone = [pod for pod in groups.node.former if pod.name.startswith(f"{DECODE}-1")]
    assert {pod.name: pod.states[0].last_end for pod in gone} == {
        f"{DECODE}-1": "exited 0",
        f"{DECODE}-1-1": "exited 0",
    }, groups.describe()


def change_decode(objects: list[dict[str, Any]], old: str, new: str) -> list[dict[str, Any]]:
    """With other words in the arguments of the decode worker, and it alone."""
    found = [one for one in objects if one["kind"] == "LeaderWorkerSet"]
    (container,) = found[0]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    assert old in " ".join(container["args"])
    container["args"] = [word.replace(old, new) for word in container["args"]]
    needed = ("ConfigMap", "Secret", "ServiceAccount", "LeaderWorkerSet")
    return [one for one in objects if one["kind"] in needed]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("--host-index=", "--host-number=", "`tandem worker` takes no --host-number="),
        ("$(HOST_INDEX)", "$(HOST)", "argument --host-index: invalid int value: '$(HOST)'"),
    ],
)
def test_a_wrong_flag_or_variable_of_a_group_fails_with_its_reason(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    objects = change_decode(rendered(), old, new)
    with (
        pytest.raises(AssertionError, match=f"{DECODE} cannot be run") as caught,
        cluster_of(objects, tmp_path) as cluster,
    ):
        cluster.wait_ready()
    assert said in str(caught.value)


TLS: Values = {"tls": {"enabled": True, "existingSecret": "certificates"}}


def certificates(folder: Path) -> dict[str, Any]:
    """A Secret with the names that docs/use/kubernetes.md asks for."""
    domain = f"{NAMESPACE}.svc.cluster.local"
    of_router = (ROUTER, f"{ROUTER}.{NAMESPACE}", f"{ROUTER}.{NAMESPACE}.svc", f"{ROUTER}.{domain}")
    workers = (f"*.{name}.{domain}" for name in (PREFILL, DECODE))
    names = ("localhost", *of_router, f"{ROUTER}s.{domain}", *workers)
    made = make_certificates(folder / "tls", names)
    keys = {"tls.crt": made.cert, "tls.key": made.key, "ca.crt": made.ca}
    data = {name: base64.b64encode(Path(path).read_bytes()).decode() for name, path in keys.items()}
    return {"kind": "Secret", "metadata": {"name": "certificates"}, "data": data}


@pytest.mark.nightly
def test_a_worker_of_two_pods_serves_with_tls(tmp_path: Path) -> None:
    objects = [*rendered(TLS), certificates(tmp_path)]
    with cluster_of(objects, tmp_path / "run") as cluster:
        cluster.wait_ready()
        status, said = cluster.run_test()
        assert status == 0, said
