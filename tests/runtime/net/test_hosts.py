"""Which address of a host lies in the network that the configuration names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from runtime.config import ClusterConfig, ClusterSection
from runtime.config.file import on_this_host
from runtime.errors import ConfigError
from runtime.net.hosts import (
    OwnAddress,
    address_towards,
    choose_address,
    interface_of,
    own_address,
    own_interfaces,
)
from worker.arguments import parse_worker_options

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["192.168.1.7"],
    "ib0": ["10.1.0.7", "10.2.0.7", "fd00::7"],
}


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ("10.2.0.0/16", OwnAddress(interface="ib0", address="10.2.0.7")),
        ("10.0.0.0/8", OwnAddress(interface="ib0", address="10.1.0.7")),
        ("192.168.1.99/24", OwnAddress(interface="eth0", address="192.168.1.7")),
        ("fd00::/64", OwnAddress(interface="ib0", address="fd00::7")),
        ("ib0", OwnAddress(interface="ib0", address="10.1.0.7")),
    ],
)
def test_a_host_has_one_address_in_a_network(network: str, expected: OwnAddress) -> None:
    assert choose_address(network, INTERFACES, "node-7") == expected


@pytest.mark.parametrize("network", ["10.3.0.0/16", "eth1"])
def test_a_host_without_an_address_in_it_is_named(network: str) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_address(network, INTERFACES, "node-7")
    assert str(raised.value).startswith(
        f"cluster.network = {network!r}: host node-7 has no address"
    )
    assert "eth0 192.168.1.7" in str(raised.value)


@pytest.mark.parametrize("network", ["10.0.0.0/33", "ten/8"])
def test_what_is_no_network_is_refused(network: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.network = .*is no network"):
        ClusterSection(network=network)


@pytest.mark.parametrize("address", ["", "remote", "host", "host:", ":6379", "host:0", "host:x"])
def test_what_names_no_ray_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.ray_address = .*names no Ray.*ray start"):
        ClusterSection(ray_address=address)


def test_this_machine_is_asked() -> None:
    assert own_address("127.0.0.0/8").address == "127.0.0.1"
    assert interface_of("127.0.0.1", own_interfaces()) == own_address("127.0.0.0/8").interface
    assert interface_of("203.0.113.9", own_interfaces()) == ""
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_a_process_listens_at_its_hosts_address_in_the_network(tmp_path: Path) -> None:
    section = ClusterSection(network="127.0.0.0/8", host="0.0.0.0", advertise="elsewhere")
    config = dataclasses.replace(ClusterConfig(), cluster=section)
    own = on_this_host(config).cluster
    assert (own.host, own.advertise) == ("127.0.0.1", "")

    path = tmp_path / "cluster.toml"
    text = '[cluster]\nnetwork = "127.0.0.0/8"\nsecret = "s"\n[model]\npath = "/m"\n'
    path.write_text(text, encoding="utf-8")
    words = ["--config", str(path), "--instance", "decode-0", "--router", "a:1"]
    assert parse_worker_options("decode", words).listen.reach == "127.0.0.1"
    given = parse_worker_options("decode", [*words, "--host", "127.0.0.2"])
    assert given.listen.reach == "127.0.0.2"
