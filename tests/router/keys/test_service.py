"""One ledger for several processes, over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from router.keys.ledger import Charge, KeyLedger, LimitKind
from router.keys.record import LEAST_OUTPUT, KeyLimits
from router.keys.service import KeysService, RemoteLedger
from runtime.errors import PeerLostError
from runtime.net.credentials import Credentials, Listen
from runtime.pb import keys_pb2_grpc
from runtime.rpc.grpc_calls import bind_port, create_server

CREDENTIALS = Credentials.of_secret("of tests")


@dataclass
class Shared:
    ledger: KeyLedger
    address: str
    first: RemoteLedger
    second: RemoteLedger


@pytest.fixture
async def shared() -> AsyncIterator[Shared]:
    """Two processes' ways to the ledger of a third."""
    ledger = KeyLedger(lambda: 0.0)
    server = create_server(CREDENTIALS)
    keys_pb2_grpc.add_KeysServicer_to_server(KeysService(ledger), server)
    address = f"127.0.0.1:{bind_port(server, Listen(bind='127.0.0.1'), CREDENTIALS)}"
    await server.start()
    ways = [RemoteLedger(address, CREDENTIALS) for _ in range(2)]
    yield Shared(ledger, address, *ways)
    for way in ways:
        await way.close()
    await server.stop(None)


def charge(holder: str, num_tokens: int = 10) -> Charge:
    return Charge(name="alice", holder=holder, num_tokens=num_tokens)


async def test_processes_spend_of_the_same_buckets(shared: Shared) -> None:
    limits = KeyLimits(requests_per_minute=3, tokens_per_minute=100, max_concurrent_requests=9)
    told = [
        await shared.first.admit(charge("http-1"), limits),
        await shared.second.admit(charge("http-2"), limits),
        await shared.first.admit(charge("http-1"), limits),
        await shared.second.admit(charge("http-2"), limits),
    ]
    assert [each.refused_by for each in told] == [None, None, None, LimitKind.REQUESTS]
    assert [each.tokens.remaining for each in told if each.tokens] == [90, 80, 70, 70]
    assert told[3].retry_after_s == pytest.approx(20.0)
    assert told[0].requests is not None
    assert told[0].requests.limit == 3
    assert told[0].requests.reset_s == pytest.approx(20.0)
    no_limits = await shared.first.admit(charge("http-1"), KeyLimits(max_concurrent_requests=9))
    assert no_limits.requests is no_limits.tokens is None


async def test_what_a_request_cost_is_told_when_it_ends(shared: Shared) -> None:
    limits = KeyLimits(tokens_per_minute=100, max_concurrent_requests=1)
    assert (await shared.first.admit(charge("http-1", 60), limits)).refused_by is None
    refused = await shared.second.admit(charge("http-2", 1), limits)
    assert refused.refused_by is LimitKind.CONCURRENCY
    shared.first.settle(charge("http-1", 60), 60, 25, 5)
    async with asyncio.timeout(60):
        while shared.ledger.num_running("alice"):
            await asyncio.sleep(0.005)
    admitted = await shared.second.admit(charge("http-2", 1), limits)
    assert admitted.refused_by is None
    assert admitted.tokens is not None
    assert admitted.tokens.remaining == 74


async def test_what_is_used_meanwhile_is_told_by_each_process(shared: Shared) -> None:
    limits = KeyLimits(tokens_per_minute=1000, requests_per_minute=100)
    long = replace(charge("http-1", 60), num_open=1)
    assert (await shared.first.admit(long, limits)).num_tokens == 60 + LEAST_OUTPUT
    shared.first.spend("alice", num_tokens=484)
    shared.second.spend("alice", num_requests=2.5)
    await shared.first.close()  # which tells what is left
    await shared.second.close()
    last = shared.ledger.decide(charge("here", 0), limits)
    assert last.tokens is not None
    assert last.tokens.remaining == 200
    assert last.requests is not None
    assert last.requests.remaining == 95  # of 95.5


async def test_a_request_that_cannot_be_counted_is_not_let_in(shared: Shared) -> None:
    stranger = RemoteLedger(shared.address, Credentials.of_secret("another"))
    nobody = RemoteLedger("127.0.0.1:1", CREDENTIALS)
    with pytest.raises(PeerLostError):
        await nobody.admit(charge("http-1"), KeyLimits(requests_per_minute=1))
    with pytest.raises(Exception, match="UNAUTHENTICATED"):
        await stranger.admit(charge("http-1"), KeyLimits(requests_per_minute=1))
    assert shared.ledger.num_running("alice") == 0
    for each in (stranger, nobody):
        await each.close()
