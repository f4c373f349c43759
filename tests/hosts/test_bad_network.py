"""Links that are slow and lose packets, a controller that is killed, a Ray that goes away.

One cluster that outlives its controller: router on a, prefill on b, decode on c. The tests are one
story, in order; the last one ends Ray.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from deploy.running.sweep import is_alive
from tests.hosts.cluster import HostedCluster, serving
from tests.hosts.hosts import Hosts, why_no_hosts
from tests.hosts.load import Expected, Load
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_no_hosts()), reason=f"no hosts here: {why_no_hosts()}"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedCluster]:
    with (
        Hosts("abc") as hosts,
        serving(
            hosts,
            tmp_path_factory.mktemp("hosted"),
            {"a": 0, "b": 1, "c": 1},
            cluster='on_controller_loss = "keep"\n',
        ) as cluster,
    ):
        yield cluster


def pids_of(cluster: HostedCluster) -> dict[str, int]:
    return {name: one["pid"] for name, one in cluster.processes().items()}


@pytest.mark.parametrize(("delay_s", "loss"), [(0.05, 0.0), (0.0, 0.01)], ids=["50 ms", "1 %"])
def test_slow_links_that_lose_packets_lose_no_request(
    cluster: HostedCluster, expected: Expected, delay_s: float, loss: float
) -> None:
    pids = pids_of(cluster)
    for host in "bc":
        cluster.hosts.impair(host, delay_s=delay_s, loss=loss)
    with Load(cluster.base_url, expected) as load:
        wait_until(lambda: len(load.answered_at) >= 20, "requests are answered", 240)
    for host in "bc":
        cluster.hosts.mend(host)
    assert load.failures == []
    assert pids_of(cluster) == pids
    cluster.wait_idle()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_controller_is_followed_by_another_and_no_stream_notices(
    cluster: HostedCluster, expected: Expected, number: signal.Signals
) -> None:
    pids, state = pids_of(cluster), cluster.state()
    with Load(cluster.base_url, expected) as load:
        wait_until(lambda: len(load.answered_at) >= 1, "a request is answered")
        os.kill(state["pid"], number)
        wait_until(lambda: not is_alive(state["pid"]), "the controller has ended")
        gone = time.monotonic()
        wait_until(lambda: load.num_answered_since(gone) >= 2, "it serves without a controller")
        cluster.up()
        wait_until(lambda: cluster.controller_log().count("took over") == 3, "it is taken over")
        wait_until(
            lambda: all(one["phase"] == "ready" for one in cluster.processes().values()),
            "the state is right",
        )
    assert load.failures == []
    assert pids_of(cluster) == pids
    assert cluster.state()["pid"] != state["pid"]
    assert cluster.state()["started"] == state["started"]
    cluster.wait_idle()


def test_what_outlived_its_controller_is_ended_on_all_hosts(cluster: HostedCluster) -> None:
    pids, state = pids_of(cluster), cluster.state()
    os.kill(state["pid"], signal.SIGKILL)
    wait_until(lambda: not is_alive(state["pid"]), "the controller has ended")
    cluster.down()
    for pid in pids.values():
        wait_until(lambda pid=pid: not is_alive(pid), f"process {pid} has ended", 30)
    cluster.up()  # its room is free again
    assert set(pids_of(cluster)) == set(pids)


def test_a_cluster_that_does_not_fit_is_refused_with_what_there_is(
    cluster: HostedCluster,
) -> None:
    other = HostedCluster(cluster.hosts, cluster.folder, "other")
    other.configure("[router]\nport = 8001\ncontrol_port = 8101\n[prefill]\ntp = 2\n")
    result = other.tandem("up", "--detach", str(other.config_path))
    assert result.returncode == 1, result.stdout
    told = "prefill-0: no room: it asks for a host with 2 CPU; Ray has"
    assert told in result.stdout
    assert all(one["phase"] == "ready" for one in cluster.processes().values())


def test_a_ray_that_goes_away_is_told_with_the_fix(cluster: HostedCluster) -> None:
    state = cluster.state()
    for pid in head_daemons(cluster):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(state["pid"]), "the controller ends", 120)
    assert "has not answered for" in cluster.controller_log()
    assert "start Ray again, then `tandem up`" in cluster.state()["error"]


def head_daemons(cluster: HostedCluster) -> list[int]:
    """The pids of Ray's own store on the head."""
    temporary = f"th-{cluster.hosts.token}-a"
    return [
        process.pid
        for process in psutil.process_iter()
        if process.name() == "gcs_server" and temporary in " ".join(process.cmdline())
    ]
