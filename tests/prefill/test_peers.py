"""One handshake per decode rank and life, shared by all who need it; failures are typed."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from prefill.peers import ChannelCache, Greeting, PeerDirectory, peer_of
from runtime.errors import LayoutMismatchError, PeerLostError, StaleTicketError
from runtime.pb import common_pb2
from runtime.rpc import open_channel
from tests.prefill.fake_decode import CREDENTIALS, LAYOUT, SLOT_BYTES, FakeDecode, serve_decode

GREETING = Greeting(
    identity=common_pb2.WorkerIdentity(instance="prefill-0", epoch=5),
    num_ranks=2,
    transport="loopback",
    layout=LAYOUT,
    slot_bytes=SLOT_BYTES,
)


@pytest.fixture
async def decode() -> AsyncIterator[FakeDecode]:
    async with serve_decode(FakeDecode()) as served:
        yield served


@pytest.fixture
async def peers() -> AsyncIterator[PeerDirectory]:
    channels = ChannelCache(lambda address: open_channel(address, CREDENTIALS))
    directory = PeerDirectory(GREETING, channels)
    yield directory
    await directory.close()
    await channels.close()


async def test_concurrent_callers_share_one_handshake(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    decode.handshake_gate = asyncio.Event()
    calls = [asyncio.create_task(peers.endpoint(decode.identity, decode.address)) for _ in range(5)]
    await asyncio.sleep(0.05)
    decode.handshake_gate.set()
    endpoints = await asyncio.gather(*calls)
    endpoints.append(await peers.endpoint(decode.identity, decode.address))
    assert len(decode.handshakes) == 1
    assert len(set(endpoints)) == 1
    assert endpoints[0].peer == peer_of(decode.identity)
    assert endpoints[0].fence_generation == 3
    said = decode.handshakes[0]
    assert said.prefill.instance == "prefill-0"
    assert said.num_prefill_ranks == 2
    assert said.layout_fingerprint == LAYOUT.fingerprint()
    assert said.expected == decode.identity


async def test_one_callers_cancellation_is_not_the_others(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    decode.handshake_gate = asyncio.Event()
    first = asyncio.create_task(peers.endpoint(decode.identity, decode.address))
    second = asyncio.create_task(peers.endpoint(decode.identity, decode.address))
    await asyncio.sleep(0.05)
    first.cancel()
    decode.handshake_gate.set()
    assert (await second).endpoint == b"endpoint"
    assert first.cancelled()
    assert len(decode.handshakes) == 1


@pytest.mark.parametrize("error", [LayoutMismatchError("block_size"), StaleTicketError("epoch")])
async def test_a_refusal_is_typed_and_not_remembered(
    decode: FakeDecode, peers: PeerDirectory, error: LayoutMismatchError | StaleTicketError
) -> None:
    decode.handshake_error = error
    with pytest.raises(type(error), match=error.message):
        await peers.endpoint(decode.identity, decode.address)
    decode.handshake_error = None
    assert (await peers.endpoint(decode.identity, decode.address)).endpoint == b"endpoint"
    assert len(decode.handshakes) == 2


async def test_another_process_at_the_address_is_stale(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    former = common_pb2.WorkerIdentity(instance="decode-0", epoch=76)
    with pytest.raises(StaleTicketError, match="answers at"):
        await peers.endpoint(former, decode.address)


async def test_slots_of_another_size_are_a_layout_mismatch(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    decode.slot_bytes += 64
    with pytest.raises(LayoutMismatchError, match="metadata slots"):
        await peers.endpoint(decode.identity, decode.address)


async def test_another_transport_is_a_layout_mismatch(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    decode.transport = "pigeon"
    with pytest.raises(LayoutMismatchError, match="pigeon"):
        await peers.endpoint(decode.identity, decode.address)


async def test_a_decode_that_is_not_there_is_a_lost_peer(peers: PeerDirectory) -> None:
    nobody = common_pb2.WorkerIdentity(instance="decode-9", epoch=1)
    with pytest.raises(PeerLostError, match="decode-9"):
        await peers.endpoint(nobody, "127.0.0.1:1")
    assert peers.num_peers == 0


async def test_a_forgotten_peer_is_met_again(decode: FakeDecode, peers: PeerDirectory) -> None:
    endpoint = await peers.endpoint(decode.identity, decode.address)
    peers.forget(endpoint.peer)
    peers.forget(endpoint.peer)
    await peers.endpoint(decode.identity, decode.address)
    assert len(decode.handshakes) == 2


async def test_a_new_life_of_a_rank_replaces_the_former_one(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    await peers.endpoint(decode.identity, decode.address)
    decode.identity = common_pb2.WorkerIdentity(instance="decode-0", epoch=78)
    await peers.endpoint(decode.identity, decode.address)
    assert peers.num_peers == 1
    other_rank = common_pb2.WorkerIdentity(instance="decode-0", epoch=78, rank=1)
    decode.identity = other_rank
    await peers.endpoint(other_rank, decode.address)
    assert peers.num_peers == 2


async def test_a_ticket_of_after_a_fence_brings_a_new_handshake(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    former = await peers.endpoint(decode.identity, decode.address, 3)
    decode.fence_generation = 4
    calls = [peers.endpoint(decode.identity, decode.address, 4) for _ in range(3)]
    for endpoint in await asyncio.gather(*calls):
        assert endpoint.fence_generation == 4
    assert len(decode.handshakes) == 2
    assert await peers.endpoint(decode.identity, decode.address, 3) == former
    assert len(decode.handshakes) == 2


async def test_a_peer_that_is_forgotten_during_its_handshake_is_lost_to_its_callers(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    decode.handshake_gate = asyncio.Event()
    call = asyncio.create_task(peers.endpoint(decode.identity, decode.address))
    await asyncio.sleep(0.05)
    peers.forget(peer_of(decode.identity))
    with pytest.raises(PeerLostError, match="during the handshake"):
        await call
    decode.handshake_gate.set()


async def test_a_failure_that_nobody_waited_for_is_not_remembered(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    decode.handshake_gate = asyncio.Event()
    decode.handshake_error = StaleTicketError("epoch")
    call = asyncio.create_task(peers.endpoint(decode.identity, decode.address))
    await asyncio.sleep(0.05)
    call.cancel()
    decode.handshake_gate.set()
    while peers.num_peers:
        await asyncio.sleep(0.01)
    decode.handshake_error = None
    assert (await peers.endpoint(decode.identity, decode.address)).endpoint == b"endpoint"
