"""Which ports a cluster opens, who reaches them and what they ask for."""

from __future__ import annotations

import pytest
from rich.console import Console

from deploy.checks.posture import Port, posture_of
from deploy.views.display import posture_table
from runtime.config import (
    ClusterConfig,
    ClusterSection,
    DecodeSection,
    KVTransferSection,
    PrefillSection,
    RouterSection,
    TlsSection,
)

OUTSIDE = ClusterSection(host="10.0.0.5")


def ports(config: ClusterConfig) -> dict[str, Port]:
    return {port.name: port for port in posture_of(config)}


def with_loopback(**sections: object) -> ClusterConfig:
    return ClusterConfig(kv_transfer=KVTransferSection(transport="loopback"), **sections)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["loopback", "nixl"])
def test_nobody_else_reaches_a_cluster_on_the_loopback_interface(transport: str) -> None:
    config = ClusterConfig(
        prefill=PrefillSection(tp=2), kv_transfer=KVTransferSection(transport=transport)
    )
    found = posture_of(config)
    assert {port.reach for port in found} == {"this machine"}
    assert not any(port.is_open for port in found)


def test_mooncake_is_open_wherever_the_cluster_listens() -> None:
    data = ports(ClusterConfig(kv_transfer=KVTransferSection(transport="mooncake")))
    assert data["KV data (mooncake's own)"].is_open
    assert not data["KV control (mooncake)"].is_open


def test_ports_of_several_routers_are_told() -> None:
    config = with_loopback(cluster=OUTSIDE, router=RouterSection(instances=3))
    assert ports(config)["HTTP"].where == "10.0.0.5:8000 to 8002"
    spanning = ClusterSection(host="10.0.0.5", ray_address="10.0.0.5:6379")
    config = with_loopback(cluster=spanning, router=RouterSection(instances=3))
    assert ports(config)["control (gRPC)"].where == "10.0.0.5:8100 to 8102, on other hosts"


def test_what_is_open_beyond_this_machine_is_told() -> None:
    config = with_loopback(cluster=OUTSIDE, decode=DecodeSection(dp=2))
    opened = {name for name, port in ports(config).items() if port.is_open}
    assert opened == {
        "HTTP",
        "worker metrics",
        "rendezvous",
        "collectives (gloo)",
    }
    control = ports(config)["control (gRPC)"]
    assert (control.where, control.reach) == ("10.0.0.5:8100", "its network")
    assert control.protection == "the secret; plain text"
    assert "tls.mode" in control.remedy


def test_http_alone_is_open_where_the_router_has_a_host_of_its_own() -> None:
    config = with_loopback(router=RouterSection(host="0.0.0.0"))
    assert {name for name, port in ports(config).items() if port.is_open} == {"HTTP"}
    http = ports(config)["HTTP"]
    assert (http.where, http.reach) == ("0.0.0.0:8000", "any network")


def test_certificates_close_what_asks_for_them() -> None:
    tls = TlsSection(mode="auto", http_mutual=True)
    found = ports(with_loopback(cluster=OUTSIDE, tls=tls))
    assert not any(port.is_open for port in found.values())
    assert found["workers (gRPC)"].protection == "the secret and a certificate; TLS"
    assert found["workers (short calls)"].protection == "the secret and a certificate; TLS"
    assert found["KV (TCP)"].protection == "a token and a certificate; TLS"
    alone = ports(with_loopback(cluster=OUTSIDE, tls=TlsSection(mode="auto", mutual=False)))
    assert alone["workers (gRPC)"].protection == "the secret; TLS"
    assert alone["HTTP"].is_open  # encrypted, and for everybody


def test_open_data_ports_are_told_though_they_were_asked_for() -> None:
    section = KVTransferSection(transport="nixl", allow_open_data_ports=True)
    data = ports(ClusterConfig(cluster=OUTSIDE, kv_transfer=section))["KV data (nixl's own)"]
    assert data.is_open
    assert data.reach == "any network"


def test_nccl_chooses_its_interface_itself() -> None:
    config = with_loopback(prefill=PrefillSection(tp=2, device="cuda"))
    assert ports(config)["collectives (gloo, NCCL)"].is_open


def test_the_table_has_a_row_for_each_port() -> None:
    console = Console(width=160)
    config = with_loopback(cluster=OUTSIDE)
    with console.capture() as capture:
        console.print(posture_table(posture_of(config)), highlight=False)
    shown = capture.get()
    for port in posture_of(config):
        assert port.name in shown
        assert port.protection in shown
