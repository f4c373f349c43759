"""One cluster over four hosts and a spare one: router on a, prefill TP2 on b, decode on c and d.

Each host is a network namespace with an address of its own, and a Ray of its own temporary folder.
The tests are one story, in order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from deploy.running.sweep import is_alive
from tests.hosts.cluster import HostedCluster, serving
from tests.hosts.hosts import Hosts, why_no_hosts
from tests.hosts.load import Expected, Load
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_no_hosts()), reason=f"no hosts here: {why_no_hosts()}"),
]

AT_MOST_S = 150.0
"""From the loss until the instance's next life serves, on a machine that does much else."""
SECTIONS = """\
[router]
lease_ttl_s = 3.0
worker_wait_s = 120.0
[prefill]
tp = 2
[decode]
dp = 2
ranks_per_host = 1
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedCluster]:
    """A cluster that serves; "e" is a host without Ray yet."""
    with (
        Hosts("abcde") as hosts,
        serving(
            hosts,
            tmp_path_factory.mktemp("hosted"),
            {"a": 0, "b": 2, "c": 1, "d": 1},
            sections=SECTIONS,
        ) as cluster,
    ):
        yield cluster


def hosts_of(cluster: HostedCluster) -> dict[str, str]:
    """The name of each process's host."""
    names = {host.address: name for name, host in cluster.hosts.hosts.items()}
    return {name: names[one["host"]] for name, one in cluster.processes().items()}


def wait_served(cluster: HostedCluster, load: Load, since: float, what: str) -> float:
    """Seconds from ``since`` until all is ready again and a request was answered after that."""

    def is_ready() -> bool:
        return all(one["phase"] == "ready" for one in cluster.processes().values())

    wait_until(is_ready, f"{what}: every process is ready", 120)
    ready = time.monotonic()
    wait_until(lambda: load.num_answered_since(ready) > 0, f"{what}: a request is answered")
    return load.answered_at[-1] - since


def test_the_path_goes_over_four_hosts(cluster: HostedCluster, expected: Expected) -> None:
    hosts = hosts_of(cluster)
    assert hosts["router"] == "a"
    assert hosts["prefill-0/0"] == hosts["prefill-0/1"] == "b"
    assert {hosts["decode-0/0"], hosts["decode-0/1"]} == {"c", "d"}
    with Load(cluster.base_url, expected) as load:
        wait_until(lambda: len(load.answered_at) >= 4, "requests are answered")
    assert load.failures == []
    status = cluster.status()
    assert status is not None
    addresses = {one["address"].rpartition(":")[0] for one in status["workers"]}
    assert addresses == {cluster.hosts[name].address for name in "bcd"}
    cluster.wait_idle()


def test_a_host_that_is_cut_off_for_a_moment_loses_nothing(
    cluster: HostedCluster, expected: Expected
) -> None:
    with Load(cluster.base_url, expected) as load:
        wait_until(lambda: len(load.answered_at) >= 1, "a request is answered")
        pids = {name: one["pid"] for name, one in cluster.processes().items()}
        cluster.hosts.cut("b")
        time.sleep(2.0)
        cluster.hosts.rejoin("b")
        wait_served(cluster, load, time.monotonic(), "after a cut")
    assert load.failures == []
    assert {name: one["pid"] for name, one in cluster.processes().items()} == pids
    cluster.wait_idle()


def test_instances_of_a_lost_host_run_elsewhere_and_requests_go_on(
    cluster: HostedCluster, expected: Expected, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.start_ray("e", 1)
    with Load(cluster.base_url, expected) as load:
        wait_until(lambda: len(load.answered_at) >= 1, "a request is answered")
        began = time.monotonic()
        cluster.hosts.kill("c")
        wait_until(
            lambda: cluster.processes()["decode-0/0"]["num_restarts"] >= 1, "the loss is seen"
        )
        seen_s = time.monotonic() - began
        served_s = wait_served(cluster, load, began, "after a lost host")
    with capsys.disabled():
        print(f"\nlost host: seen after {seen_s:.1f} s, served again after {served_s:.1f} s")
    assert load.failures == []
    hosts = hosts_of(cluster)
    assert {hosts["decode-0/0"], hosts["decode-0/1"]} == {"d", "e"}
    assert served_s < AT_MOST_S
    cluster.wait_idle()


def test_without_room_status_says_so_until_a_host_comes_back(
    cluster: HostedCluster, expected: Expected
) -> None:
    with Load(cluster.base_url, expected) as load:
        wait_until(lambda: len(load.answered_at) >= 1, "a request is answered")
        cluster.hosts.kill("e")
        wait_until(
            lambda: "no room: it asks for 2 times a host with 1 CPU" in stage_of(cluster),
            "it says what is lacking",
        )
        assert cluster.hosts["e"].address not in stage_of(cluster)
        cluster.hosts.rejoin("c")
        cluster.start_ray("c", 1)
        wait_served(cluster, load, time.monotonic(), "after a host came back")
    assert load.failures == []
    assert set(hosts_of(cluster).values()) == {"a", "b", "c", "d"}
    cluster.wait_idle()


def stage_of(cluster: HostedCluster) -> str:
    return str(cluster.processes()["decode-0/0"]["stage"])


def test_down_leaves_nothing_on_any_host(cluster: HostedCluster) -> None:
    pids = [one["pid"] for one in cluster.processes().values()]
    folder = cluster.folder / cluster.name / "hosts"
    assert {path.name for path in folder.iterdir()} >= {cluster.hosts["b"].address}
    cluster.down()
    for pid in pids:
        wait_until(lambda pid=pid: not is_alive(pid), f"process {pid} has ended", 30)
    own = [folder / cluster.hosts[name].address for name in "abd"]  # c and e died in between
    left = [path for one in own for path in one.rglob("*") if path.suffix in (".toml", ".pem")]
    assert left == []
    assert list(folder.rglob("*.log")), "logs stay"
