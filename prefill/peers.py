"""Asking decode ranks for tickets; how their memory is reached: one endpoint per life of a rank.

A claim compares the two workers each time, and says what we know of the rank: the answer brings the
endpoint through which senders write where we have none, or where decode has shut somebody out since
ours was given. Claims that meet a new rank at the same time may each bring it; the newest is kept.
A peer that was lost is forgotten by `forget`, and a restarted one (new epoch) is another peer. All
of it lives on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from kv_transfer.layout import KVLayout
from kv_transfer.ticket import PeerEndpoint
from kv_transfer.transport import peer_name
from runtime.errors import InternalError, LayoutMismatchError, StaleTicketError, TandemError
from runtime.logging import fields, get_logger
from runtime.pb import common_pb2, decode_pb2, decode_pb2_grpc
from runtime.rpc.grpc_calls import map_rpc_errors
from runtime.rpc.wire import error_from_proto, own_wire, same_identity, why_refused

logger = get_logger(__name__)


def peer_of(identity: common_pb2.WorkerIdentity) -> str:
    """The name of a rank in the transports."""
    return peer_name(identity.instance, identity.epoch, identity.rank)


@dataclass(frozen=True, slots=True)
class RankAddress:
    """One life of a decode rank, as calls reach it."""

    address: str
    epoch: int

    @classmethod
    def of(cls, reservation: decode_pb2.Reservation) -> RankAddress:
        """Where the reservation is."""
        return cls(reservation.decode_address, reservation.decode.epoch)


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
    """What we say of ourselves in every claim."""

    identity: common_pb2.WorkerIdentity
    num_ranks: int
    transport: str
    layout: KVLayout
    slot_bytes: int
    """Of a metadata slot; both sides compute it from the same settings."""


@dataclass(frozen=True, slots=True)
class ClaimedTicket:
    """Decode's ticket, and the endpoint that is good for it."""

    ticket: decode_pb2.TransferTicket
    peer: PeerEndpoint


@dataclass(frozen=True, slots=True)
class _Contact:
    decode: common_pb2.WorkerIdentity
    address: str
    endpoint: PeerEndpoint


class PeerDirectory:
    """The decode ranks that this worker has tickets of. Used on one event loop only."""

    def __init__(self, greeting: Greeting, channels: ChannelCache) -> None:
        self._greeting = greeting
        self._channels = channels
        self._contacts: dict[str, _Contact] = {}  # by peer name

    @property
    def num_peers(self) -> int:
        """Peers whose endpoint is known."""
        return len(self._contacts)

    async def claim(
        self, request_id: str, reservation: decode_pb2.Reservation, timeout_s: float
    ) -> ClaimedTicket | TandemError:
        """Wait until decode has room for a request, at most `timeout_s`.

        Returns:
            The ticket, or decode's refusal: then it holds nothing for us.

        Raises:
            LayoutMismatchError, StaleTicketError, InternalError: the answer does not fit us.
            PeerLostError, DeadlineExceededError: nobody answers, or not in time.
        """
        decode, address = reservation.decode, reservation.decode_address
        peer = peer_of(decode)
        contact = self._contacts.get(peer)
        known = contact.endpoint if contact is not None else None
        request = self._request(request_id, reservation, known)
        with map_rpc_errors(f"claim at {peer} ({address})", request_id):
            response: decode_pb2.ClaimResponse = await self._channels.decode_stub(address).Claim(
                request, timeout=timeout_s
            )
        if response.WhichOneof("result") == "error":
            name = f"{decode.instance}/{decode.rank}"
            return error_from_proto(response.error, relayed_from=name)
        if response.HasField("endpoint"):
            known = self._check_endpoint(response.endpoint, decode, address)
            await self._remember(_Contact(decode, address, known))
        if known is None:
            raise InternalError(f"{peer} gave a ticket and no endpoint", request_id=request_id)
        # Of before a fence or of after it: a ticket goes with the endpoint of its claim alone.
        return ClaimedTicket(response.ticket, known)

    def forget(self, peer: str) -> None:
        """Have the next claim at `peer` (a transport's peer name) bring a new endpoint."""
        if self._contacts.pop(peer, None) is not None:
            logger.info("forgot a decode rank %s", fields(peer=peer))

    def _request(
        self, request_id: str, reservation: decode_pb2.Reservation, known: PeerEndpoint | None
    ) -> decode_pb2.ClaimRequest:
        greeting = self._greeting
        return decode_pb2.ClaimRequest(
            request_id=request_id,
            nonce=reservation.nonce,
            decode=reservation.decode,
            prefill=greeting.identity,
            num_prefill_ranks=greeting.num_ranks,
            transport=greeting.transport,
            layout_fingerprint=greeting.layout.fingerprint(),
            layout_description=greeting.layout.describe(),
            metadata_slot_bytes=greeting.slot_bytes,
            has_endpoint=known is not None,
            fence_generation=known.fence_generation if known is not None else 0,
            wire=own_wire(),
        )

    def _check_endpoint(
        self,
        endpoint: decode_pb2.PeerEndpoint,
        decode: common_pb2.WorkerIdentity,
        address: str,
    ) -> PeerEndpoint:
        peer, greeting = peer_of(decode), self._greeting
        if reason := why_refused(f"decode rank {peer}", endpoint.wire):
            raise LayoutMismatchError(reason)
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
        return PeerEndpoint(
            peer=peer,
            endpoint=endpoint.endpoint,
            kv_region_bytes=endpoint.kv_region_bytes,
            metadata_region_bytes=endpoint.metadata_region_bytes,
            fence_generation=endpoint.fence_generation,
        )

    async def _remember(self, contact: _Contact) -> None:
        peer = contact.endpoint.peer
        held = self._contacts.get(peer)
        if held and held.endpoint.fence_generation > contact.endpoint.fence_generation:
            return  # a later claim was answered first
        if held is None:
            logger.info("met a decode rank %s", fields(peer=peer, address=contact.address))
        self._contacts[peer] = contact
        await self._forget_former_lives(contact)

    async def _forget_former_lives(self, contact: _Contact) -> None:
        decode = contact.decode
        for peer, other in list(self._contacts.items()):
            is_same_rank = (other.decode.instance, other.decode.rank) == (
                decode.instance,
                decode.rank,
            )
            if is_same_rank and other.decode.epoch != decode.epoch:
                self.forget(peer)
                if other.address != contact.address:
                    await self._channels.drop(other.address)
