"""A claim brings the ticket, and an endpoint where ours is missing or of before a fence."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from prefill.peers import ChannelCache, ClaimedTicket, Greeting, PeerDirectory, peer_of
from runtime.errors import (
    DeadlineExceededError,
    InternalError,
    LayoutMismatchError,
    PeerLostError,
    StaleTicketError,
    TandemError,
)
from runtime.pb import common_pb2
from runtime.rpc.grpc_calls import open_channel
from runtime.version import WIRE
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
    yield PeerDirectory(GREETING, channels)
    await channels.close()


async def claim(
    peers: PeerDirectory, decode: FakeDecode, nonce: int, timeout_s: float = 10.0
) -> ClaimedTicket:
    answer = await peers.claim(f"request-{nonce}", decode.reserve(nonce, [1, 2]), timeout_s)
    assert isinstance(answer, ClaimedTicket), answer
    return answer


async def test_the_first_claim_brings_the_endpoint_and_the_next_needs_none(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    first, second = await claim(peers, decode, 1), await claim(peers, decode, 2)
    assert first.peer == second.peer
    assert first.peer.peer == peer_of(decode.identity)
    assert first.peer.fence_generation == 3
    assert (first.ticket.nonce, list(first.ticket.block_ids)) == (1, [1, 2])
    said = decode.claims
    assert [claim.has_endpoint for claim in said] == [False, True]
    assert said[1].fence_generation == 3
    assert (said[0].prefill.instance, said[0].num_prefill_ranks) == ("prefill-0", 2)
    assert said[0].layout_fingerprint == LAYOUT.fingerprint()
    assert said[0].metadata_slot_bytes == SLOT_BYTES
    assert (said[0].decode, said[0].request_id) == (decode.identity, "request-1")


async def test_one_callers_cancellation_is_not_the_others(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    decode.claim_gate = asyncio.Event()
    first, second = (asyncio.create_task(claim(peers, decode, nonce)) for nonce in (1, 2))
    while len(decode.claims) < 2:
        await asyncio.sleep(0.01)
    first.cancel()
    while decode.num_cancelled_claims < 1:
        await asyncio.sleep(0.01)
    decode.claim_gate.set()
    assert (await second).peer.endpoint == b"endpoint"
    assert first.cancelled()


@pytest.mark.parametrize("error", [LayoutMismatchError("block_size"), StaleTicketError("epoch")])
async def test_a_refusal_is_typed(
    decode: FakeDecode, peers: PeerDirectory, error: TandemError
) -> None:
    decode.claim_error = error
    answer = await peers.claim("request-1", decode.reserve(1, [1]), 10.0)
    assert type(answer) is type(error)
    assert error.message in answer.message
    assert answer.relayed_from == "decode-0/0"
    decode.claim_error = None
    assert (await claim(peers, decode, 2)).peer.endpoint == b"endpoint"


async def test_another_process_at_the_address_is_stale(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    reservation = decode.reserve(1, [1])
    reservation.decode.epoch = 76
    with pytest.raises(StaleTicketError, match="answers at"):
        await peers.claim("request-1", reservation, 10.0)
    assert peers.num_peers == 0


async def test_slots_of_another_size_are_a_layout_mismatch(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    decode.slot_bytes += 64
    with pytest.raises(LayoutMismatchError, match="metadata slots"):
        await claim(peers, decode, 1)


@pytest.mark.parametrize("wire", [common_pb2.Wire(), common_pb2.Wire(number=WIRE + 1)])
async def test_a_rank_that_speaks_something_else_is_not_written_to(
    decode: FakeDecode, peers: PeerDirectory, wire: common_pb2.Wire
) -> None:
    decode.wire = wire
    said = (
        f"decode rank .* speaks wire {wire.number} .*, this process wire {WIRE} .*Fix: one version"
    )
    with pytest.raises(LayoutMismatchError, match=said):
        await claim(peers, decode, 1)
    assert peers.num_peers == 0


async def test_another_transport_is_a_layout_mismatch(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    decode.transport = "pigeon"
    with pytest.raises(LayoutMismatchError, match="pigeon"):
        await claim(peers, decode, 1)


async def test_a_ticket_without_a_way_to_use_it_is_a_bug_of_decode(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    decode.has_endpoint = False
    with pytest.raises(InternalError, match="no endpoint"):
        await claim(peers, decode, 1)


async def test_a_decode_that_is_not_there_is_a_lost_peer(peers: PeerDirectory) -> None:
    nobody = FakeDecode(common_pb2.WorkerIdentity(instance="decode-9", epoch=1), "127.0.0.1:1")
    with pytest.raises(PeerLostError, match="decode-9"):
        await claim(peers, nobody, 1)
    assert peers.num_peers == 0


async def test_a_decode_without_room_is_waited_for_no_longer_than_the_request_has(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    decode.claim_gate = asyncio.Event()
    with pytest.raises(DeadlineExceededError):
        await claim(peers, decode, 1, timeout_s=0.05)


async def test_a_forgotten_peer_is_met_again(decode: FakeDecode, peers: PeerDirectory) -> None:
    met = await claim(peers, decode, 1)
    peers.forget(met.peer.peer)
    peers.forget(met.peer.peer)
    await claim(peers, decode, 2)
    assert [claim.has_endpoint for claim in decode.claims] == [False, False]


async def test_a_new_life_of_a_rank_replaces_the_former_one(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    await claim(peers, decode, 1)
    decode.identity = common_pb2.WorkerIdentity(instance="decode-0", epoch=78)
    await claim(peers, decode, 2)
    assert peers.num_peers == 1
    decode.identity = common_pb2.WorkerIdentity(instance="decode-0", epoch=78, rank=1)
    await claim(peers, decode, 3)
    assert peers.num_peers == 2


async def test_a_claim_at_a_life_that_does_not_answer_ends_when_the_next_one_is_met(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    """The former one may stand still for ever, and its connection with it."""
    await claim(peers, decode, 1)
    decode.claim_gate = asyncio.Event()
    waiting = asyncio.create_task(claim(peers, decode, 2))
    while len(decode.claims) < 2:
        await asyncio.sleep(0.01)
    async with serve_decode(FakeDecode()) as successor:
        successor.identity = common_pb2.WorkerIdentity(instance="decode-0", epoch=78)
        await claim(peers, successor, 3)
        with pytest.raises(PeerLostError, match="the connection was closed"):
            await asyncio.wait_for(waiting, 60)


async def test_a_claim_after_a_fence_brings_a_new_endpoint_and_one_of_before_keeps_its_own(
    decode: FakeDecode, peers: PeerDirectory
) -> None:
    await claim(peers, decode, 1)
    decode.answer_gate = asyncio.Event()
    before = asyncio.create_task(claim(peers, decode, 2))
    while len(decode.claims) < 2:
        await asyncio.sleep(0.01)
    gate, decode.answer_gate = decode.answer_gate, None
    decode.fence_generation = 4
    after = await claim(peers, decode, 3)
    assert (after.ticket.fence_generation, after.peer.fence_generation) == (4, 4)
    gate.set()
    late = await before
    assert (late.ticket.fence_generation, late.peer.fence_generation) == (3, 3)
    assert (await claim(peers, decode, 4)).peer.fence_generation == 4
    assert [claim.has_endpoint for claim in decode.claims] == [False, True, True, True]
