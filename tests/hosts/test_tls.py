"""Certificates that a cluster over three hosts makes for itself, and those of one command.

The first cluster: router on a, prefill on b, decode on c, and a controller that may die. The tests
of it are one story, in order.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.running.sweep import is_alive
from tests.hosts.by_hand import ByHand
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
[tls]
mode = "auto"
[router]
lease_ttl_s = 3.0
worker_wait_s = 150.0
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedCluster]:
    with (
        Hosts("abc") as hosts,
        serving(
            hosts,
            tmp_path_factory.mktemp("tls"),
            {"a": 0, "b": 1, "c": 1},
            sections=SECTIONS,
            cluster='on_controller_loss = "keep"\n',
            has_tls=True,
        ) as cluster,
    ):
        yield cluster


def folders_of(cluster: HostedCluster) -> dict[str, Path]:
    """Of each process of a host, where its files are."""
    found = (cluster.folder / cluster.name / "hosts").glob("*/*/config.toml")
    return {path.parent.name: path.parent for path in found}


def test_every_process_has_a_key_of_its_own(cluster: HostedCluster, expected: Expected) -> None:
    with Load(cluster.base_url, expected, ca=cluster.ca) as load:
        wait_until(lambda: len(load.answered_at) >= 4, "requests are answered")
    assert load.failures == []
    folders = folders_of(cluster)
    assert set(folders) == {"router", "prefill-0", "decode-0"}
    keys = {(folder / "key.pem").read_text() for folder in folders.values()}
    keys.add((cluster.ca.parent / "key.pem").read_text())
    assert len(keys) == 4
    modes = {path.stat().st_mode & 0o777 for one in folders.values() for path in one.iterdir()}
    assert modes == {0o600}


def test_the_addresses_of_the_certificates_are_those_of_the_hosts(cluster: HostedCluster) -> None:
    status = cluster.status()
    assert status is not None
    hosts = set()
    context = ssl.create_default_context(cafile=str(cluster.ca))
    for worker in status["workers"]:
        host, _, port = worker["metrics_address"].rpartition(":")
        with (
            socket.create_connection((host, int(port)), 10) as plain,
            context.wrap_socket(plain, server_hostname=host) as encrypted,
        ):
            assert encrypted.version() in ("TLSv1.2", "TLSv1.3")
        hosts.add(host)
    assert hosts == {cluster.hosts[name].address for name in "bc"}


def test_a_later_controller_has_certificates_for_what_it_starts(
    cluster: HostedCluster, expected: Expected
) -> None:
    state, processes = cluster.state(), cluster.processes()
    with Load(cluster.base_url, expected, ca=cluster.ca) as load:
        wait_until(lambda: len(load.answered_at) >= 1, "a request is answered")
        os.kill(state["pid"], signal.SIGKILL)
        wait_until(lambda: not is_alive(state["pid"]), "the controller has ended")
        cluster.up()
        before = (folders_of(cluster)["decode-0"] / "key.pem").read_text()
        os.kill(processes["decode-0"]["pid"], signal.SIGKILL)
        wait_until(lambda: is_back(cluster, "decode-0"), "decode is back", 180)
        since = time.monotonic()
        wait_until(lambda: load.num_answered_since(since) >= 2, "requests are answered")
    assert load.failures == []
    assert (folders_of(cluster)["decode-0"] / "key.pem").read_text() != before
    cluster.wait_idle()


def is_back(cluster: HostedCluster, name: str) -> bool:
    process = cluster.processes()[name]
    return process["num_restarts"] > 0 and process["phase"] == "ready"


def test_down_leaves_no_key_on_any_host(cluster: HostedCluster) -> None:
    cluster.down()
    assert folders_of(cluster) == {}
    assert list(cluster.folder.rglob("*.pem")) == []


BY_HAND = """\
[tls]
mode = "files"
cert = "{folder}/cert.pem"
key = "{folder}/key.pem"
ca = "{folder}/ca.pem"
[router]
allow_anonymous = true
[kv_transfer]
transport = "loopback"
"""


def test_hosts_serve_with_the_files_of_one_command(tmp_path: Path, expected: Expected) -> None:
    with Hosts("abc") as hosts:
        out = tmp_path / "tls"
        addresses = {name: hosts[name].address for name in "abc"}
        made = main(["certificates", "--hosts", ",".join(addresses.values()), "--out", str(out)])
        assert made == 0
        configs = {
            name: BY_HAND.format(folder=out / address) for name, address in addresses.items()
        }
        with ByHand(hosts, tmp_path, configs) as by_hand:
            by_hand.router()
            by_hand.worker("b", "prefill", "prefill-0")
            by_hand.worker("c", "decode", "decode-0")
            by_hand.wait_ready("b", "c")
            base_url = by_hand.base_url.replace("http:", "https:")
            with Load(base_url, expected, ca=out / "ca.pem") as load:
                wait_until(lambda: len(load.answered_at) >= 4, "requests are answered")
            assert load.failures == []
