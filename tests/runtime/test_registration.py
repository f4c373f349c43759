"""A worker's lease through refusals, lost calls and restarts of routers, over real gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from runtime.errors import ConfigError, InternalError, InvalidRequestError
from runtime.pb import registry_pb2
from runtime.registration import RegistryClient
from runtime.wire import error_to_proto
from tests.runtime.fake_registry import RIGHT, FakeRegistry, serve, until


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
