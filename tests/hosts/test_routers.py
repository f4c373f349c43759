"""Two routers on two hosts of a cluster over four: a and b, prefill and decode on c and d.

Either router may go, with its host or alone, and the other serves. The tests are one story, in
order.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.hosts.cluster import HostedCluster, serving
from tests.hosts.hosts import Hosts, why_no_hosts
from tests.hosts.load import Expected, Load
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_no_hosts()), reason=f"no hosts here: {why_no_hosts()}"),
]

SECTIONS = """\
[router]
instances = 2
lease_ttl_s = 3.0
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedCluster]:
    with (
        Hosts("abcd") as hosts,
        serving(
            hosts,
            tmp_path_factory.mktemp("routers"),
            {"a": 0, "b": 0, "c": 1, "d": 1},
            sections=SECTIONS,
            cluster='on_controller_loss = "keep"\n',
        ) as cluster,
    ):
        yield cluster


def url_of(cluster: HostedCluster, host: str) -> str:
    return f"http://{cluster.hosts[host].address}:{8000 + 'ab'.index(host)}"


def is_ready(cluster: HostedCluster, name: str, num_restarts: int) -> bool:
    process = cluster.processes()[name]
    return process["phase"] == "ready" and process["num_restarts"] == num_restarts


def some_more(load: Load) -> None:
    since = time.monotonic()
    wait_until(lambda: load.num_answered_since(since) >= 2, "requests are answered")


def test_each_router_serves_at_the_address_of_its_host(
    cluster: HostedCluster, expected: Expected
) -> None:
    processes, hosts = cluster.processes(), cluster.hosts
    assert processes["router"]["host"] == hosts["a"].address
    assert processes["router-1"]["host"] == hosts["b"].address
    state = cluster.state()
    assert state["endpoint"] == f"{url_of(cluster, 'a')}/v1"
    assert state["further_endpoints"] == [f"{url_of(cluster, 'b')}/v1"]
    for host in "ab":
        with Load(url_of(cluster, host), expected) as load:
            some_more(load)
        assert load.failures == []
    shown = cluster.tandem("status", "--config", str(cluster.config_path))
    assert shown.returncode == 0, shown.stdout
    assert hosts["b"].address in shown.stdout
    logs = cluster.tandem("logs", "--config", str(cluster.config_path), "router-1")
    assert "router-1" in logs.stdout


def test_a_lost_host_takes_its_router_along_and_the_other_serves(
    cluster: HostedCluster, expected: Expected
) -> None:
    with Load(url_of(cluster, "a"), expected) as load:
        some_more(load)
        cluster.hosts.kill("b")
        where = f"it belongs on host {cluster.hosts['b'].address}"
        wait_until(lambda: where in cluster.processes()["router-1"]["stage"], "it says so", 90)
        some_more(load)
        cluster.hosts.rejoin("b")
        cluster.start_ray("b", 0)
        wait_until(lambda: is_ready(cluster, "router-1", 1), "the router is back", 120)
        some_more(load)
    assert load.failures == []
    with Load(url_of(cluster, "b"), expected) as load:
        some_more(load)
    assert load.failures == []


def test_the_first_router_may_go_too(cluster: HostedCluster, expected: Expected) -> None:
    with Load(url_of(cluster, "b"), expected) as load:
        some_more(load)
        os.kill(cluster.processes()["router"]["pid"], signal.SIGKILL)
        wait_until(lambda: is_ready(cluster, "router", 1), "the router is back")
        some_more(load)
    assert load.failures == []


def test_a_later_controller_finds_routers_where_they_are(
    cluster: HostedCluster, expected: Expected
) -> None:
    before, state = cluster.processes(), cluster.state()
    with Load(url_of(cluster, "b"), expected) as load:
        some_more(load)
        os.kill(state["pid"], signal.SIGKILL)
        some_more(load)
        cluster.up()
        assert cluster.state()["further_endpoints"] == state["further_endpoints"]
    assert load.failures == []
    pids = {name: one["pid"] for name, one in cluster.processes().items()}
    assert pids == {name: one["pid"] for name, one in before.items()}
    os.kill(pids["router-1"], signal.SIGKILL)
    restarts = before["router-1"]["num_restarts"] + 1
    wait_until(lambda: is_ready(cluster, "router-1", restarts), "the router is back")
    assert cluster.processes()["router-1"]["host"] == cluster.hosts["b"].address
