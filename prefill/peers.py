"""First contact with decode ranks: one handshake per (instance, epoch, rank), then remembered.

The handshake compares KV layouts and brings the endpoint through which senders write. Callers that
need the same peer at the same time share one call. A failure is not remembered, so the next request
tries anew; a peer that was lost is forgotten by `forget`, and a restarted one (new epoch) is
another peer. All of it lives on the event loop; a request shakes hands before it is queued, never
in the engine loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from kv_transfer.layout import KVLayout
from kv_transfer.ticket import PeerEndpoint
from kv_transfer.transport import peer_name
from runtime.errors import LayoutMismatchError, PeerLostError, StaleTicketError
from runtime.logging import fields, get_logger
from runtime.pb import common_pb2, decode_pb2, decode_pb2_grpc
from runtime.rpc import map_rpc_errors
from runtime.wire import error_from_proto, same_identity

HANDSHAKE_TIMEOUT_S = 10.0

logger = get_logger(__name__)


def peer_of(identity: common_pb2.WorkerIdentity) -> str:
    """The name of a rank in the transports."""
    return peer_name(identity.instance, identity.epoch, identity.rank)


class ChannelCache:
    """One gRPC channel per address, opened when first asked for."""

    def __init__(self, open_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._open_channel = open_channel
        self._channels: dict[str, grpc.aio.Channel] = {}

    def decode_stub(self, address: str) -> decode_pb2_grpc.DecodeStub:
        """The Decode service at `address`."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open_channel(address)
        return decode_pb2_grpc.DecodeStub(channel)

    async def drop(self, address: str) -> None:
        """Close the channel to an address that nobody serves any more."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close(None)

    async def close(self) -> None:
        """Close all channels."""
        for address in list(self._channels):
            await self.drop(address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What we say of ourselves in every handshake."""

    identity: common_pb2.WorkerIdentity
    num_ranks: int
    transport: str
    layout: KVLayout
    slot_bytes: int
    """Of a metadata slot; both sides compute it from the same settings."""


@dataclass(frozen=True, slots=True)
class _Contact:
    peer: str
    decode: common_pb2.WorkerIdentity
    address: str
    handshake: asyncio.Task[PeerEndpoint]
    former: PeerEndpoint | None
    """The endpoint of before the last fence."""


class PeerDirectory:
    """The decode ranks that this worker has met. Used on one event loop only."""

    def __init__(self, greeting: Greeting, channels: ChannelCache) -> None:
        self._greeting = greeting
        self._channels = channels
        self._contacts: dict[str, _Contact] = {}  # by peer name

    @property
    def num_peers(self) -> int:
        """Peers that are known or being met."""
        return len(self._contacts)

    async def endpoint(
        self, decode: common_pb2.WorkerIdentity, address: str, fence_generation: int = 0
    ) -> PeerEndpoint:
        """Return how to write into `decode`, which serves gRPC at `address`.

        Args:
            decode: whom a ticket names.
            address: of its gRPC service.
            fence_generation: of the ticket. A newer one than the endpoint's says that decode has
                shut somebody out since: it may have been us, so we ask again.

        Raises:
            LayoutMismatchError: the two workers store KV differently.
            StaleTicketError: another life of the worker answers at the address.
            PeerLostError, DeadlineExceededError: nobody answers, or not in time.
        """
        contact = self._contacts.get(peer_of(decode))
        if contact is None:
            contact = self._meet(decode, address, former=None)
        endpoint = await self._result_of(contact)
        if endpoint.fence_generation < fence_generation:
            newer = self._contacts.get(contact.peer)
            if newer is None or newer is contact:
                newer = self._meet(decode, address, former=endpoint)
            endpoint = await self._result_of(newer)
        elif contact.former is not None and fence_generation < endpoint.fence_generation:
            # A ticket of before the fence goes with the endpoint of before the fence or not at all.
            endpoint = contact.former
        return endpoint

    def forget(self, peer: str) -> None:
        """Shake hands again before the next request for `peer` (a transport's peer name)."""
        contact = self._contacts.pop(peer, None)
        if contact is not None:
            contact.handshake.cancel()
            logger.info("forgot a decode rank %s", fields(peer=peer))

    async def close(self) -> None:
        """Cancel the handshakes under way."""
        contacts, self._contacts = list(self._contacts.values()), {}
        for contact in contacts:
            contact.handshake.cancel()
        await asyncio.gather(*(item.handshake for item in contacts), return_exceptions=True)

    def _meet(
        self, decode: common_pb2.WorkerIdentity, address: str, former: PeerEndpoint | None
    ) -> _Contact:
        handshake = asyncio.ensure_future(self._shake_hands(decode, address))
        contact = _Contact(peer_of(decode), decode, address, handshake, former)
        self._contacts[contact.peer] = contact
        handshake.add_done_callback(lambda _: self._drop_failed(contact))
        return contact

    def _drop_failed(self, contact: _Contact) -> None:
        handshake = contact.handshake
        failed = handshake.cancelled() or handshake.exception() is not None
        if failed and self._contacts.get(contact.peer) is contact:
            del self._contacts[contact.peer]

    async def _result_of(self, contact: _Contact) -> PeerEndpoint:
        try:
            # Shielded: one caller's cancellation is not the others'.
            return await asyncio.shield(contact.handshake)
        except asyncio.CancelledError:
            if contact.handshake.cancelled():
                raise PeerLostError(f"{contact.peer} was lost during the handshake") from None
            raise

    async def _forget_former_lives(self, decode: common_pb2.WorkerIdentity) -> None:
        for peer, contact in list(self._contacts.items()):
            other = contact.decode
            same_rank = (other.instance, other.rank) == (decode.instance, decode.rank)
            if same_rank and other.epoch != decode.epoch:
                self.forget(peer)
                await self._channels.drop(contact.address)

    async def _shake_hands(self, decode: common_pb2.WorkerIdentity, address: str) -> PeerEndpoint:
        await self._forget_former_lives(decode)
        greeting = self._greeting
        request = decode_pb2.HandshakeRequest(
            prefill=greeting.identity,
            num_prefill_ranks=greeting.num_ranks,
            transport=greeting.transport,
            layout_fingerprint=greeting.layout.fingerprint(),
            layout_description=greeting.layout.describe(),
            expected=decode,
        )
        peer = peer_of(decode)
        with map_rpc_errors(f"handshake with {peer} at {address}"):
            response: decode_pb2.HandshakeResponse = await self._channels.decode_stub(
                address
            ).Handshake(request, timeout=HANDSHAKE_TIMEOUT_S)
        if response.WhichOneof("result") == "error":
            raise error_from_proto(response.error)
        endpoint = response.endpoint
        if not same_identity(endpoint.decode, decode):
            raise StaleTicketError(f"{peer_of(endpoint.decode)} answers at {address}, not {peer}")
        if endpoint.transport != greeting.transport:
            raise LayoutMismatchError(
                f"{peer} speaks {endpoint.transport!r}, we speak {greeting.transport!r}: set the "
                "same kv_transfer.transport on both"
            )
        if endpoint.metadata_slot_bytes != greeting.slot_bytes:
            raise LayoutMismatchError(
                f"{peer} has metadata slots of {endpoint.metadata_slot_bytes} bytes, ours have "
                f"{greeting.slot_bytes}: run the same version and model on both"
            )
        logger.info("met a decode rank %s", fields(peer=peer, address=address))
        return PeerEndpoint(
            peer=peer,
            endpoint=endpoint.endpoint,
            kv_region_bytes=endpoint.kv_region_bytes,
            metadata_region_bytes=endpoint.metadata_region_bytes,
            fence_generation=endpoint.fence_generation,
        )
