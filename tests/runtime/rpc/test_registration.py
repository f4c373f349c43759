"""A worker's lease through refusals, lost calls and restarts of routers, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.certificates import make_certificates
from runtime.errors import ConfigError, InternalError, InvalidRequestError
from runtime.net import router_names
from runtime.net.router_names import RouterName, follow, parse_routers, resolve_host
from runtime.pb import common_pb2, registry_pb2
from runtime.rpc.registration import RegistryClient
from runtime.rpc.wire import error_to_proto
from runtime.version import WIRE
from tests.runtime.rpc.fake_registry import RIGHT, FakeRegistry, serve
from tests.waiting import until


def refusal(text: str, *, superseded: bool = False) -> registry_pb2.RegisterResponse:
    error = error_to_proto(InvalidRequestError(text))
    return registry_pb2.RegisterResponse(error=error, superseded=superseded)


def client_of(*ports: int, load=registry_pb2.WorkerLoad) -> RegistryClient:
    record = registry_pb2.WorkerRecord()
    record.identity.instance = "decode-0"
    return RegistryClient(",".join(f"127.0.0.1:{port}" for port in ports), RIGHT, record, load)


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    registry = FakeRegistry()
    server, registry.port = await serve(registry)
    yield registry
    await server.stop(None)


@pytest.fixture
async def client(registry: FakeRegistry) -> AsyncIterator[RegistryClient]:
    client = client_of(registry.port)
    await client.start()
    yield client
    await client.close()


async def test_a_worker_stays_registered_through_a_router_restart() -> None:
    server, port = await serve(FakeRegistry())
    client = client_of(port)
    await client.start()
    await server.stop(None)
    reborn = FakeRegistry()
    server, _ = await serve(reborn, port)
    await until(lambda: bool(reborn.leases))
    client.set_draining()
    await until(lambda: reborn.draining)
    await client.close()
    assert reborn.leases == {}
    await server.stop(None)


async def test_a_refusal_after_the_first_success_is_tried_again(
    registry: FakeRegistry, client: RegistryClient, caplog: pytest.LogCaptureFixture
) -> None:
    registry.refusal = refusal("model = 'other'")
    with caplog.at_level(logging.WARNING):
        registry.leases.clear()
        await until(lambda: registry.num_registrations >= 3)
    assert not client.is_registered
    said = [record.message for record in caplog.records if "refused" in record.message]
    assert len(said) == 1
    assert "other" in said[0]
    registry.refusal = registry_pb2.RegisterResponse()
    await until(lambda: client.is_registered)


async def test_an_earlier_life_keeps_asking_from_its_start(registry: FakeRegistry) -> None:
    registry.refusal = refusal("a later life serves", superseded=True)
    client = client_of(registry.port)
    start = asyncio.create_task(client.start())
    await until(lambda: registry.num_registrations >= 2)
    assert not start.done()
    registry.refusal = registry_pb2.RegisterResponse()
    await start
    assert client.is_registered
    await client.close()


async def test_a_worker_that_is_refused_at_its_start_ends(registry: FakeRegistry) -> None:
    registry.refusal = refusal("model = 'other'")
    client = client_of(registry.port)
    with pytest.raises(ConfigError, match="other"):
        await client.start()
    await client.close()


@pytest.mark.parametrize("wire", [None, common_pb2.Wire(number=WIRE + 1, version="9.9")])
async def test_a_worker_leaves_a_router_that_speaks_something_else(
    registry: FakeRegistry, wire: common_pb2.Wire | None
) -> None:
    """One of before the numbers lets in whoever comes."""
    registry.wire = wire
    client = client_of(registry.port)
    with pytest.raises(ConfigError) as raised:
        await client.start()
    number, version = (WIRE + 1, "9.9") if wire else (0, "of an unknown version")
    assert f"speaks wire {number} (Tandem {version}), this process wire {WIRE}" in str(raised.value)
    assert raised.value.fix.startswith("one version of Tandem on both")
    assert not client.is_registered
    assert registry.leases == {}, "it was given back"
    await client.close()


async def test_a_worker_whose_router_was_replaced_by_another_version_says_so(
    registry: FakeRegistry, client: RegistryClient
) -> None:
    assert client.refusal == ""
    ours, registry.wire = registry.wire, common_pb2.Wire(number=WIRE + 1)
    registry.leases.clear()
    await until(lambda: f"speaks wire {WIRE + 1}" in client.refusal)
    registry.wire = ours
    await until(lambda: client.is_registered)
    assert client.refusal == ""


async def test_a_bug_in_the_renewal_ends_the_worker(registry: FakeRegistry) -> None:
    is_broken = False

    def load() -> registry_pb2.WorkerLoad:
        if is_broken:
            raise KeyError("no such gauge")
        return registry_pb2.WorkerLoad()

    client = client_of(registry.port, load=load)
    await client.start()
    failed = asyncio.create_task(client.wait_failed())
    await until(lambda: bool(registry.renewals))
    assert not failed.done()
    is_broken = True
    with pytest.raises(InternalError, match="not renewed") as caught:
        await asyncio.wait_for(failed, 60)
    assert isinstance(caught.value.__cause__, KeyError)
    await client.close()


async def test_nobody_is_told_of_a_failure_when_the_client_closes(
    client: RegistryClient,
) -> None:
    failed = asyncio.create_task(client.wait_failed())
    await asyncio.sleep(0)
    await client.close()
    await asyncio.wait_for(failed, 60)


async def test_a_registration_says_load_and_draining_at_once(registry: FakeRegistry) -> None:
    client = client_of(registry.port, load=lambda: registry_pb2.WorkerLoad(num_free_blocks=7))
    await client.start()
    client.set_draining()
    await until(lambda: registry.draining)
    registry.leases.clear()
    await until(lambda: bool(registry.leases))
    again = registry.leases[f"lease-{registry.num_registrations}"]
    assert again.worker.draining
    assert again.worker.started_ms > 1_600_000_000_000
    assert again.load.num_free_blocks == 7
    sequences = [request.load.sequence for request in registry.renewals]
    assert sequences[0] > 0
    assert sequences == sorted(set(sequences))
    await client.close()


async def test_one_lost_renewal_is_repeated_within_the_lease() -> None:
    registry = FakeRegistry(ttl_s=4.0)
    server, port = await serve(registry)
    client = client_of(port)
    await client.start()
    registry.silent.clear()
    client.set_draining()  # renews at once, into silence
    await until(lambda: len(registry.renewals) == 2)
    registry.silent.set()
    assert client.is_registered
    await client.close()
    await server.stop(None)


async def test_a_worker_holds_a_lease_at_each_router(registry: FakeRegistry) -> None:
    server, absent = await serve(FakeRegistry())
    await server.stop(None)
    client = client_of(absent, registry.port)
    await client.start()  # one of them is enough
    late = FakeRegistry()
    server, _ = await serve(late, absent)
    await until(lambda: bool(late.leases and registry.leases))
    await client.close()
    assert not late.leases
    assert not registry.leases
    await server.stop(None)


async def test_a_lease_that_is_granted_while_its_worker_leaves_is_given_back(
    registry: FakeRegistry,
) -> None:
    """Else the router would send requests to nobody until it ends."""
    registry.silent.clear()
    client = client_of(registry.port)
    starting = asyncio.create_task(client.start())
    await until(lambda: bool(registry.leases))
    leaving = asyncio.create_task(client.close())
    await asyncio.sleep(0.05)
    registry.silent.set()
    await leaving
    assert not registry.leases
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)


class Names:
    """A resolver whose answers the test writes."""

    def __init__(self, *ports: int) -> None:
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        self.error: OSError | None = None
        self.num_asked = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        assert (host, port) == ("routers.example", 8100)
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return list(self.addresses)

    async def look(self, times: int = 1) -> None:
        asked = self.num_asked
        await until(lambda: self.num_asked > asked + times)


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_names, "RESOLVE_S", 0.01)


def named_client(names: Names, routers: str = "dns+routers.example:8100") -> RegistryClient:
    record = registry_pb2.WorkerRecord()
    record.identity.instance = "decode-0"
    return RegistryClient(routers, RIGHT, record, registry_pb2.WorkerLoad, resolve=names)


@pytest.mark.usefixtures("_often")
async def test_a_name_stands_for_all_routers_that_it_resolves_to(registry: FakeRegistry) -> None:
    names = Names()
    client = named_client(names)
    start = asyncio.create_task(client.start())
    await names.look()
    assert not start.done(), "there is no router yet"
    names.addresses = [f"127.0.0.1:{registry.port}"]
    await asyncio.wait_for(start, 60)
    assert client.is_registered
    client.set_draining()
    late = FakeRegistry()
    server, port = await serve(late)
    names.addresses.append(f"127.0.0.1:{port}")
    await until(lambda: bool(late.leases))
    assert next(iter(late.leases.values())).worker.draining, "it was said before it was there"
    assert registry.num_registrations == 1, "and who was there is not asked again"
    del names.addresses[0]
    await until(lambda: not registry.leases)
    failed = asyncio.create_task(client.wait_failed())
    await names.look()
    assert not failed.done()
    await until(lambda: client.is_registered)
    assert late.leases
    await client.close()
    assert not late.leases
    await asyncio.wait_for(failed, 60)
    await server.stop(None)


@pytest.mark.usefixtures("_often")
async def test_names_that_cannot_be_looked_up_for_a_while_close_nothing(
    registry: FakeRegistry,
) -> None:
    names = Names(registry.port)
    client = named_client(names)
    await client.start()
    names.error = OSError("no answer")
    await names.look(5)
    assert len(registry.leases) == 1
    names.error = None
    await names.look(5)
    assert registry.num_registrations == 1
    await client.close()


async def test_one_answer_that_lacks_a_router_closes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_names, "RESOLVE_S", 0.0)
    answers = [["a:1", "b:1"], ["a:1"], ["a:1"], ["a:1", "b:1"], *[["a:1"]] * 3]

    async def resolve(host: str, port: int) -> list[str]:
        return answers.pop(0)

    seen = []
    async with contextlib.aclosing(follow(RouterName("x", 1), resolve)) as looks:
        async for routers in looks:
            seen.append("".join(sorted(router.address[0] for router in routers)))
            if not answers:
                break
    assert seen == [*["ab"] * 6, "a"]


async def test_a_name_and_addresses_in_one_list(registry: FakeRegistry) -> None:
    other = FakeRegistry()
    server, port = await serve(other)
    names = Names(port)
    client = named_client(names, f"127.0.0.1:{registry.port}, dns+routers.example:8100")
    await client.start()
    await until(lambda: client._num_held() == 2)
    assert registry.leases
    assert other.leases
    await client.close()
    assert not registry.leases
    assert not other.leases
    await server.stop(None)


async def test_with_tls_the_certificate_is_for_the_name(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "tls", ("routers.example",))
    credentials = dataclasses.replace(RIGHT, tls=files)
    registry = FakeRegistry()
    server, port = await serve(registry, credentials=credentials)
    record = registry_pb2.WorkerRecord()
    record.identity.instance = "decode-0"
    client = RegistryClient(
        "dns+routers.example:8100",
        credentials,
        record,
        registry_pb2.WorkerLoad,
        resolve=Names(port),
    )
    await asyncio.wait_for(client.start(), 60)
    await client.close()
    await server.stop(None)


@pytest.mark.parametrize("routers", ["", "nowhere", "dns+host", "a:1,dns+:8100", "host:port"])
def test_what_names_no_router_is_refused(routers: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_routers(routers)


async def test_the_system_resolves_to_all_addresses() -> None:
    assert "127.0.0.1:80" in await resolve_host("127.0.0.1", 80)
