"""Plans: which processes a configuration means, and how each is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from deploy.hosts.places import Place, Places, local_ranks
from deploy.plan import Role, num_devices_needed, plan_instances, process_specs
from runtime.config import ClusterConfig, DecodeSection, PrefillSection
from tests.deploy.fakes import fake_config, fake_context

COUNTS = st.integers(1, 4)
DEVICES = st.sampled_from(["cpu", "cuda"])
PREFILLS = st.one_of(
    st.builds(PrefillSection, instances=COUNTS, tp=COUNTS, device=DEVICES),
    st.builds(PrefillSection, instances=COUNTS, dp=COUNTS, device=DEVICES),
)
DECODES = st.builds(DecodeSection, instances=COUNTS, dp=COUNTS, device=DEVICES)


@given(PREFILLS, DECODES)
def test_every_rank_is_planned_once(prefill: PrefillSection, decode: DecodeSection) -> None:
    config = ClusterConfig(prefill=prefill, decode=decode)
    plans = plan_instances(config)
    assert len({plan.name for plan in plans}) == len(plans)
    ranks = {role: sum(p.num_ranks for p in plans if p.role is role) for role in Role}
    assert ranks == {
        Role.ROUTER: 1,
        Role.PREFILL: prefill.instances * max(prefill.tp, prefill.dp),
        Role.DECODE: decode.instances * decode.dp,
    }
    expected = ranks[Role.PREFILL] * (prefill.device == "cuda")
    expected += ranks[Role.DECODE] * (decode.device == "cuda")
    assert num_devices_needed(plans) == expected


def places(*hosts: str, advertise: str = "") -> Places:
    ranks = tuple(Place(bind=host, advertise=advertise) for host in hosts)
    return Places(ranks=ranks, rendezvous=f"{ranks[0].host}:999")


def test_a_process_is_told_who_it_is(tmp_path: Path) -> None:
    config = fake_config(tmp_path, decode_dp=2)
    config = dataclasses.replace(config, decode=dataclasses.replace(config.decode, num_threads=3))
    context = fake_context(config, tmp_path)
    router, _, decode = plan_instances(config)
    first, second = process_specs(decode, context, places("127.0.0.1", "127.0.0.1"))
    assert (first.name, second.name) == ("decode-0/0", "decode-0/1")
    assert first.log_path != second.log_path
    assert " ".join(second.command).endswith(
        f"decode --config {context.config_path} --instance decode-0 --rank 1 "
        f"--grace 10 --rendezvous 127.0.0.1:999 --router {context.control_address} --host 127.0.0.1"
    )
    assert second.env["OMP_NUM_THREADS"] == "3"
    assert second.env["TANDEM_CLUSTER"] == context.run_id
    (only,) = process_specs(router, context, places("127.0.0.1"))
    assert only.command[-4:] == ("--config", str(context.config_path), "--grace", "10")


def test_each_process_is_told_the_address_of_its_own_host(tmp_path: Path) -> None:
    config = fake_config(tmp_path, decode_dp=2)
    context = fake_context(config, tmp_path)
    decode = plan_instances(config)[2]
    first, second = process_specs(decode, context, places("10.0.0.3", "10.0.0.4"))
    assert first.command[-2:] == ("--host", "10.0.0.3")
    assert second.command[-2:] == ("--host", "10.0.0.4")
    for spec in (first, second):
        assert "--rendezvous 10.0.0.3:999" in " ".join(spec.command)


def test_a_process_is_told_the_address_that_it_tells_others(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    cluster = dataclasses.replace(config.cluster, host="0.0.0.0", advertise="node-1")
    section = dataclasses.replace(config.kv_transfer, transport="loopback")
    config = dataclasses.replace(config, cluster=cluster, kv_transfer=section)
    context = fake_context(config, tmp_path)
    told_places = places("0.0.0.0", advertise="node-1")
    (worker, *_) = process_specs(plan_instances(config)[1], context, told_places)
    assert context.control_address == f"node-1:{config.router.control_port}"
    told = f"--router {context.control_address} --host 0.0.0.0 --advertise node-1"
    assert " ".join(worker.command).endswith(told)


def test_a_prefill_worker_stays_on_one_host_and_decode_takes_as_few_as_hold_it() -> None:
    config = ClusterConfig(prefill=PrefillSection(tp=16), decode=DecodeSection(dp=72))
    router, prefill, decode = plan_instances(config)
    assert router.num_ranks_by_host == (1,)
    assert prefill.num_ranks_by_host == (16,)
    assert decode.num_ranks_by_host == (8,) * 9
    small = plan_instances(ClusterConfig(decode=DecodeSection(dp=3, ranks_per_host=2)))[2]
    assert small.num_ranks_by_host == (2, 1)


def test_ranks_are_counted_by_host() -> None:
    assert local_ranks(("b", "b", "a", "b", "a")) == (0, 1, 0, 2, 1)


def test_further_routers_are_at_the_next_ports_and_workers_know_all(tmp_path: Path) -> None:
    config = fake_config(tmp_path, routers=2)
    context = fake_context(config, tmp_path)
    first, second, prefill, _ = plan_instances(config)
    assert (first.name, second.name) == ("router", "router-1")
    port, control_port = config.router.port, config.router.control_port
    assert context.endpoints == tuple(f"http://127.0.0.1:{port + n}/v1" for n in (0, 1))
    assert context.endpoint == context.endpoints[0]
    routers = ",".join(f"127.0.0.1:{control_port + n}" for n in (0, 1))
    (worker,) = process_specs(prefill, context, places("127.0.0.1"))
    assert f"--router {routers} " in " ".join(worker.command)
    (router,) = process_specs(second, context, places("127.0.0.1"))
    assert router.command[-2:] == ("--index", "1")
    assert config.router.numbered(1).port == port + 1


def test_routers_of_several_hosts_are_known_at_their_own_addresses(tmp_path: Path) -> None:
    config = fake_config(tmp_path, routers=2)
    context = dataclasses.replace(
        fake_context(config, tmp_path), router_hosts=("10.0.0.1", "fd00::2")
    )
    port, control_port = config.router.port, config.router.control_port
    assert context.endpoints == (
        f"http://10.0.0.1:{port}/v1",
        f"http://[fd00::2]:{port + 1}/v1",
    )
    assert context.control_address == f"10.0.0.1:{control_port},[fd00::2]:{control_port + 1}"


def test_registered_ranks() -> None:
    config = ClusterConfig(prefill=PrefillSection(tp=4), decode=DecodeSection(dp=2))
    router, prefill, decode = plan_instances(config)
    assert router.registering_ranks == ()
    assert prefill.registering_ranks == (0,)
    assert decode.registering_ranks == (0, 1)
    _, prefill, _ = plan_instances(ClusterConfig(prefill=PrefillSection(dp=4)))
    assert prefill.registering_ranks == (0, 1, 2, 3)
