"""Which ranks a host runs, at which ports, and what cannot be."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest

from deploy.hosts.plan import HostPlace, HostPorts, RankPlan, check_ports, plan_ranks
from deploy.plan import Role
from deploy.ports import listen_at
from runtime.config import ClusterConfig, DecodeSection, PrefillSection
from runtime.errors import ConfigError
from runtime.net.credentials import Credentials, Listen
from runtime.net.roles import Role as Callee
from runtime.net.roles import role_secret
from worker.arguments import parse_worker_options

CONFIG = Path("/run/config.toml")
SECRET = Credentials.of_secret("hidden")
PLACE = HostPlace(
    role=Role.DECODE,
    instance="decode-7",
    host_index=0,
    num_hosts=1,
    rendezvous="",
    routers="dns+routers:8100",
    listen=Listen(bind="0.0.0.0", advertise="127.0.0.1"),
    ports=HostPorts(base=9000),
    grace_s=48.0,
)


def place(**changes: object) -> HostPlace:
    return dataclasses.replace(PLACE, **changes)  # type: ignore[arg-type]


def planned(where: HostPlace, *, dp: int = 2, device: str = "cpu") -> tuple[RankPlan, ...]:
    config = ClusterConfig(decode=DecodeSection(dp=dp, device=device))
    return plan_ranks(where, config, CONFIG, SECRET)


def option(plan: RankPlan, name: str) -> str:
    command = plan.spec.command
    return command[command.index(name) + 1]


def test_each_rank_has_ports_of_its_own() -> None:
    first, second = planned(PLACE)
    ports = ("--port", "--metrics-port", "--data-port", "--calls-port")
    assert [option(first, name) for name in ports] == ["9000", "9100", "9200", "9310"]
    assert [option(second, name) for name in ports] == ["9001", "9101", "9201", "9311"]
    assert second.metrics_address == "127.0.0.1:9101"
    assert option(first, "--rendezvous") == option(second, "--rendezvous") == "127.0.0.1:9301"


def test_a_rank_reads_its_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_SECRET", "hidden")
    file = tmp_path / "config.toml"
    file.write_text('[model]\npath = "model"\n[decode]\ndp = 2\n')
    plan = plan_ranks(PLACE, ClusterConfig(decode=DecodeSection(dp=2)), file, SECRET)[1]
    options = parse_worker_options("decode", plan.spec.command[3:])
    assert (options.instance, options.rank, options.grace_s) == ("decode-7", 1, 48.0)
    assert options.router == "dns+routers:8100"
    assert options.listen.address(options.listen.port) == "127.0.0.1:9001"
    assert (options.metrics_port, options.data_port, options.calls_port) == (9101, 9201, 9311)


def test_no_secret_is_on_a_command_line() -> None:
    for plan in planned(PLACE):
        assert plan.spec.env["TANDEM_SECRET"] == role_secret("hidden", Callee.DECODE)
        assert "hidden" not in " ".join(plan.spec.command)


def test_the_second_of_two_hosts_has_the_second_half_of_the_ranks() -> None:
    where = place(num_hosts=2, host_index=1, rendezvous="first:9301")
    plans = planned(where, dp=16)
    assert [plan.rank for plan in plans] == list(range(8, 16))
    assert option(plans[0], "--port") == "9000"
    assert option(plans[0], "--rendezvous") == "first:9301"
    assert [plan.spec.env["LOCAL_RANK"] for plan in plans] == [str(n) for n in range(8)]


def test_each_rank_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.hosts.plan.count_devices", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,6,7")
    plans = planned(PLACE, device="cuda")
    assert [plan.spec.env["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["3", "4"]
    with pytest.raises(ConfigError, match="5 ranks on this host, which has 4 CUDA devices"):
        planned(PLACE, dp=5, device="cuda")


def test_only_ranks_that_take_requests_are_asked_for_their_health() -> None:
    config = ClusterConfig(prefill=PrefillSection(tp=2))
    plans = plan_ranks(place(role=Role.PREFILL), config, CONFIG, SECRET)
    assert [plan.metrics_address for plan in plans] == ["127.0.0.1:9100", ""]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"routers": "nowhere"}, "--routers"),
        ({"num_hosts": 0}, "--hosts"),
        ({"num_hosts": 2, "host_index": 2, "rendezvous": "a:1"}, "--host-index"),
        ({"num_hosts": 2}, "--rendezvous"),
        ({"num_hosts": 3, "rendezvous": "a:1"}, "--hosts"),
        ({"num_hosts": 2, "rendezvous": "a:1", "role": Role.PREFILL}, "--hosts"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, object], path: str) -> None:
    config = ClusterConfig(decode=DecodeSection(dp=2), prefill=PrefillSection(tp=2))
    with pytest.raises(ConfigError) as caught:
        plan_ranks(place(**changes), config, CONFIG, SECRET)
    assert caught.value.path == path


@pytest.mark.parametrize("base", [0, -5, 65137])
def test_ports_that_are_none_are_refused(base: int) -> None:
    with pytest.raises(ConfigError, match="--port-base"):
        HostPorts(base=base)


def test_a_taken_port_is_named_before_a_model_is_loaded() -> None:
    with contextlib.ExitStack() as held:
        port = _taken_behind_a_free_one(held)
        where = place(listen=Listen(bind="127.0.0.1"), ports=HostPorts(base=port - 1))
        with pytest.raises(ConfigError, match=f"port {port}: cannot listen on 127.0.0.1"):
            check_ports(where, 2)


def _taken_behind_a_free_one(held: contextlib.ExitStack) -> int:
    """Return a port that is taken for as long as `held` is open; the one before it is free now."""
    for _ in range(100):
        port: int = held.enter_context(listen_at("127.0.0.1", 0)).getsockname()[1]
        with contextlib.suppress(OSError), listen_at("127.0.0.1", port - 1):
            return port
    raise AssertionError("no port is free")
