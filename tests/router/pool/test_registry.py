"""Leases under an injected clock, the gRPC face of the registry, and its watchers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import aiohttp
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from router.pool.members import (
    Departure,
    Member,
    Role,
    WorkerKey,
    WorkerLoad,
    member_from_proto,
    member_to_proto,
)
from router.pool.registry import MAX_REFUSED, REFUSED_S, Registry, SupersededError
from router.pool.registry_service import watch_forever
from runtime.errors import ConfigError
from runtime.pb import common_pb2, registry_pb2, registry_pb2_grpc
from runtime.rpc.grpc_calls import open_channel
from runtime.rpc.registration import RegistryClient
from runtime.rpc.wire import own_wire
from runtime.tiers import TierTokens
from runtime.version import WIRE
from tests.router.conftest import StartRouter
from tests.router.fakes import CREDENTIALS
from tests.waiting import until

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
    """The registry against a dictionary of expiry times, in seconds that the router was awake."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.awake = 0.0
        self.registry = Registry(["m"], TTL_S, lambda: self.now)
        self.model: dict[str, tuple[WorkerKey, float]] = {}
        self.replaced: set[WorkerKey] = set()
        self.versions = [self.registry.version]

    def holder(self, name: str, rank: int) -> WorkerKey | None:
        """Whose lease of this place runs."""
        for key, expires_at in self.model.values():
            if key.place == (name, rank) and expires_at > self.awake:
                return key
        return None

    @rule(
        target=leases, name=st.sampled_from("ab"), rank=st.integers(0, 1), epoch=st.integers(1, 3)
    )
    def register(self, name: str, rank: int, epoch: int) -> str:
        key = WorkerKey(name, epoch, rank)
        holder = self.holder(name, rank)
        if key in self.replaced and holder not in (None, key):
            with pytest.raises(SupersededError, match="later life"):
                self.registry.register(member(name, epoch, rank))
            return "refused"
        lease_id = self.registry.register(member(name, epoch, rank))
        if holder is not None and holder != key:
            self.replaced.add(holder)
        self.model = {k: v for k, v in self.model.items() if v[0].place != (name, rank)}
        self.model[lease_id] = (key, self.awake + TTL_S)
        return lease_id

    @rule(lease_id=leases, running=st.integers(0, 5))
    def renew(self, lease_id: str, running: int) -> None:
        known = lease_id in self.model and self.model[lease_id][1] > self.awake
        assert self.registry.renew(lease_id, WorkerLoad(num_requests_running=running)) == known
        if known:
            self.model[lease_id] = (self.model[lease_id][0], self.awake + TTL_S)

    @rule(lease_id=consumes(leases))
    def deregister(self, lease_id: str) -> None:
        self.registry.deregister(lease_id)
        self.model.pop(lease_id, None)

    @rule(num_ticks=st.integers(1, 50))
    def wait(self, num_ticks: int) -> None:
        for _ in range(num_ticks):
            self.stall(self.registry.tick_interval_s)

    @rule(seconds=st.integers(0, 100 * 64).map(lambda parts: parts / 64))
    def stall(self, seconds: float) -> None:
        """The router does nothing for so long; renewals that came meanwhile are yet to be read."""
        self.now += seconds
        late_s = max(0.0, seconds - self.registry.tick_interval_s)
        self.awake += seconds - late_s
        self.members_are_those_whose_lease_runs()  # before the tick that comes late, too
        assert self.registry.tick() == late_s

    @invariant()
    def members_are_those_whose_lease_runs(self) -> None:
        expected = {key for key, expires_at in self.model.values() if expires_at > self.awake}
        found = [m.key for m in self.registry.members()]
        assert set(found) == expected
        assert len(found) == len(expected)
        self.versions.append(self.registry.version)
        assert self.versions == sorted(self.versions)


RegistryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRegistryMachine = RegistryMachine.TestCase


def test_versions_tell_of_changes_only() -> None:
    registry = Registry(["m"], TTL_S, lambda: 0.0)
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


def test_a_stall_of_the_router_ends_no_lease() -> None:
    now = 0.0
    registry = Registry(["m"], TTL_S, lambda: now)
    registry.register(member())
    now += 10 * TTL_S
    assert [m.key.instance for m in registry.members()] == ["decode-0"]
    assert registry.tick() > 9 * TTL_S
    for _ in range(round(TTL_S / registry.tick_interval_s)):
        now += registry.tick_interval_s
        registry.tick()
    assert registry.members() == []


def test_the_earlier_life_of_a_place_is_refused_while_the_later_one_serves() -> None:
    registry = Registry(["m"], TTL_S, lambda: 0.0)
    earlier, later = member(epoch=1, started_ms=1000), member(epoch=2, started_ms=2000)
    registry.register(earlier)
    lease_id = registry.register(later)
    with pytest.raises(SupersededError, match="Fix"):
        registry.register(earlier)
    assert registry.members() == [later]
    registry.deregister(lease_id)
    registry.register(earlier)  # a doubled name is better than nobody
    assert registry.members() == [earlier]


def test_a_router_that_was_restarted_orders_lives_by_their_start() -> None:
    registry = Registry(["m"], TTL_S, lambda: 0.0)
    later = member(epoch=2, started_ms=2000)
    registry.register(later)
    with pytest.raises(SupersededError):
        registry.register(member(epoch=1, started_ms=1000))
    assert registry.members() == [later]
    registry.register(member(epoch=2, rank=1, started_ms=1000))  # another place


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
        num_requests_blocked=2,
        sequence=7,
        tokens_by_tier=(TierTokens(0, 0.5, 1), TierTokens(3, 0.0, 2)),
    )
    original = member(
        load=load,
        draining=True,
        block_size=64,
        started_ms=8,
        max_num_requests=9,
        num_parts=2,
        num_routers=3,
    )
    message = member_to_proto(original)
    copy = member_from_proto(message.worker, message.load)
    assert copy == original
    assert copy.load == load  # members are equal whatever their loads are


async def test_the_control_port_serves_watchers(start_router: StartRouter) -> None:
    cluster = await start_router(lease_ttl_s=3.0)
    pools: list[list[str]] = []

    def note(members: Sequence[Member], departures: Sequence[Departure]) -> None:
        pools.append([str(member.key) for member in members])

    watcher = asyncio.create_task(watch_forever(cluster.control, CREDENTIALS, "w", note))
    await until(lambda: bool(pools))
    assert pools[-1] == []
    decode = await cluster.add_decode()
    await until(lambda: pools[-1] == ["decode-0/0"])
    await decode.die()
    await until(lambda: pools[-1] == [])
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)


async def test_a_worker_of_another_model_is_told_so(start_router: StartRouter) -> None:
    cluster = await start_router()
    record = member_to_proto(member(model="other")).worker
    client = RegistryClient(cluster.control, CREDENTIALS, record, registry_pb2.WorkerLoad)
    with pytest.raises(ConfigError, match="other"):
        await client.start()
    await client.close()


@pytest.mark.parametrize("wire", [None, common_pb2.Wire(number=WIRE + 1, version="9.9")])
async def test_a_worker_that_speaks_something_else_is_refused_and_told_of(
    start_router: StartRouter, wire: common_pb2.Wire | None
) -> None:
    """By all processes of the router, whether or not the worker asks again."""
    cluster = await start_router()
    number, version = (WIRE + 1, "9.9") if wire else (0, "of an unknown version")
    said = f"worker decode-0/0 speaks wire {number} (Tandem {version}), this process wire {WIRE} "
    record = member_to_proto(member()).worker
    async with open_channel(cluster.control, CREDENTIALS) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        request = registry_pb2.RegisterRequest(worker=record, wire=wire)
        answer = await stub.Register(request)
        assert answer.error.message.startswith(said)
        assert answer.wire == own_wire()
        assert not answer.lease_id
        watch = stub.Watch(registry_pb2.WatchRequest())
        snapshot = await watch.read()
        watch.cancel()
    assert snapshot.refused == [answer.error.message]
    assert list(snapshot.members) == []
    async with aiohttp.ClientSession(cluster.url) as http:
        async with http.get("/ready") as response:
            assert (await response.json())["missing"][-1] == answer.error.message
        async with http.get("/status") as response:
            assert (await response.json())["refused"] == [answer.error.message]


def test_the_refused_are_remembered_until_they_join_or_for_ten_minutes() -> None:
    now = 0.0
    registry = Registry(["m"], TTL_S, lambda: now)
    registry.note_refused("decode-0", 0, "wire 2")
    registry.note_refused("decode-1", 0, "wire 3")
    version = registry.version
    registry.note_refused("decode-1", 0, "wire 3")
    assert registry.version == version, "the same again is no news"
    assert registry.refused() == ["wire 2", "wire 3"]
    registry.register(member("decode-0"))
    assert registry.refused() == ["wire 3"]
    for index in range(MAX_REFUSED):
        registry.note_refused("prefill-0", index, "wire 3")
    assert len(registry.refused()) == MAX_REFUSED
    for _ in range(math.ceil(REFUSED_S / registry.tick_interval_s)):
        now += registry.tick_interval_s
        registry.tick()
    version = registry.version
    registry.expire()
    assert registry.refused() == []
    assert registry.version > version, "it is told"
