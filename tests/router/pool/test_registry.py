"""Leases under an injected clock, the gRPC face of the registry, and its watchers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from router.pool.members import (
    Member,
    Role,
    WorkerKey,
    WorkerLoad,
    member_from_proto,
    member_to_proto,
)
from router.pool.registry import Registry
from router.pool.registry_service import watch_forever
from runtime.errors import ConfigError
from runtime.pb import registry_pb2
from runtime.registration import RegistryClient
from tests.router.conftest import StartRouter
from tests.router.fakes import SECRET

TTL_S = 5.0


def member(instance: str = "decode-0", epoch: int = 1, rank: int = 0, **change: object) -> Member:
    options: dict[str, object] = {
        "key": WorkerKey(instance, epoch, rank),
        "role": Role.DECODE,
        "address": "127.0.0.1:1",
        "num_ranks": 1,
        "model": "m",
        "max_model_len": 100,
        "layout_fingerprint": "l",
        "transport": "loopback",
    }
    return Member(**{**options, **change})  # type: ignore[arg-type]


class RegistryMachine(RuleBasedStateMachine):
    """The registry against a dictionary of expiry times."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.registry = Registry("m", TTL_S, lambda: self.now)
        self.model: dict[str, tuple[WorkerKey, float]] = {}
        self.versions = [self.registry.version]

    @rule(
        target=leases, name=st.sampled_from("ab"), rank=st.integers(0, 1), epoch=st.integers(1, 9)
    )
    def register(self, name: str, rank: int, epoch: int) -> str:
        key = WorkerKey(name, epoch, rank)
        lease_id = self.registry.register(member(name, epoch, rank))
        self.model = {
            k: v for k, v in self.model.items() if (v[0].instance, v[0].rank) != (name, rank)
        }
        self.model[lease_id] = (key, self.now + TTL_S)
        return lease_id

    @rule(lease_id=leases, running=st.integers(0, 5))
    def renew(self, lease_id: str, running: int) -> None:
        known = lease_id in self.model and self.model[lease_id][1] > self.now
        assert self.registry.renew(lease_id, WorkerLoad(num_requests_running=running)) == known
        if known:
            self.model[lease_id] = (self.model[lease_id][0], self.now + TTL_S)

    @rule(lease_id=consumes(leases))
    def deregister(self, lease_id: str) -> None:
        self.registry.deregister(lease_id)
        self.model.pop(lease_id, None)

    @rule(seconds=st.floats(0, 2 * TTL_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def members_are_those_whose_lease_runs(self) -> None:
        expected = {key for key, expires_at in self.model.values() if expires_at > self.now}
        found = [m.key for m in self.registry.members()]
        assert set(found) == expected
        assert len(found) == len(expected)
        self.versions.append(self.registry.version)
        assert self.versions == sorted(self.versions)


RegistryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRegistryMachine = RegistryMachine.TestCase


def test_versions_tell_of_changes_only() -> None:
    registry = Registry("m", TTL_S, lambda: 0.0)
    lease_id = registry.register(member())
    version = registry.version
    registry.renew(lease_id, WorkerLoad())
    assert registry.version == version
    registry.renew(lease_id, WorkerLoad(), draining=True)
    assert registry.version > version
    registry.renew(lease_id, WorkerLoad())
    assert registry.members()[0].draining
    with pytest.raises(ValueError, match="other"):
        registry.register(member(model="other"))


@pytest.mark.parametrize(
    "change", [{"role": 0}, {"address": ""}, {"identity": {"instance": "x", "epoch": 0}}]
)
def test_a_half_filled_record_is_refused(change: dict) -> None:
    record = member_to_proto(member()).worker
    identity = change.pop("identity", None)
    if identity is not None:
        record.identity.epoch = identity["epoch"]
    for name, value in change.items():
        setattr(record, name, value)
    with pytest.raises(ValueError, match="Fix"):
        member_from_proto(record)


def test_a_member_survives_the_wire() -> None:
    load = WorkerLoad(
        num_requests_running=1,
        num_requests_waiting=2,
        num_tokens_waiting=3,
        num_free_blocks=4,
        num_total_blocks=5,
        num_quarantined_blocks=6,
    )
    original = member(load=load, draining=True, block_size=64)
    message = member_to_proto(original)
    assert member_from_proto(message.worker, message.load) == original


async def test_the_control_port_serves_watchers(start_router: StartRouter) -> None:
    cluster = await start_router(lease_ttl_s=0.8)
    pools: list[list[str]] = []

    def note(members: Sequence[Member]) -> None:
        pools.append([str(member.key) for member in members])

    watcher = asyncio.create_task(watch_forever(cluster.control, SECRET, "w", note))
    await cluster.until(lambda: bool(pools))
    assert pools[-1] == []
    decode = await cluster.add_decode()
    await cluster.until(lambda: pools[-1] == ["decode-0/0"])
    await decode.die()
    await cluster.until(lambda: pools[-1] == [])
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)


async def test_a_worker_of_another_model_is_told_so(start_router: StartRouter) -> None:
    cluster = await start_router()
    record = member_to_proto(member(model="other")).worker
    client = RegistryClient(cluster.control, SECRET, record, registry_pb2.WorkerLoad)
    with pytest.raises(ConfigError, match="other"):
        await client.start()
    await client.close()
