"""What rank 0 tells every rank's sender, itself included, and the byte stream that carries it.

Commands travel as a stream of frames (length, type, body; little-endian), cut into pieces that fit
the area of a step's message, so no command is too long for it. Nothing here is pickled.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from kv_transfer.ticket import PeerEndpoint, SendTicket
from runtime.errors import InternalError

_FRAME = struct.Struct("<IB")  # bytes of the body, type
_NONCE = struct.Struct("<Q")
_PUSH = struct.Struct("<QI")  # nonce, first block index; then block ids
_OPEN = struct.Struct("<QQQIdQQQIII")
_LENGTH_OF_ID = struct.calcsize("<I")


@dataclass(frozen=True, slots=True)
class OpenTicket:
    """Writes under this ticket are about to come."""

    ticket: SendTicket
    peer: PeerEndpoint


@dataclass(frozen=True, slots=True)
class PushBlocks:
    """Once the step that follows is computed, these blocks are complete: send your part of them.

    Attributes:
        nonce: of the ticket.
        first_block_index: position of the first of them in the ticket's blocks.
        src_block_ids: where they lie in the pool (the same on every rank).
    """

    nonce: int
    first_block_index: int
    src_block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FinishTicket:
    """All pushes are made: close with the metadata once they have landed."""

    nonce: int


@dataclass(frozen=True, slots=True)
class AbandonTicket:
    """Send nothing more; close once what is in flight has landed."""

    nonce: int


SenderCommand = OpenTicket | PushBlocks | FinishTicket | AbandonTicket


class _FrameType(enum.IntEnum):
    OPEN = 1
    PUSH = 2
    FINISH = 3
    ABANDON = 4


def encode_command(command: SenderCommand) -> bytes:
    """Return one frame."""
    match command:
        case OpenTicket():
            return _frame(_FrameType.OPEN, _encode_open(command))
        case PushBlocks(nonce, first, block_ids):
            body = _PUSH.pack(nonce, first) + _pack_ids(block_ids)
            return _frame(_FrameType.PUSH, body)
        case FinishTicket(nonce):
            return _frame(_FrameType.FINISH, _NONCE.pack(nonce))
        case AbandonTicket(nonce):
            return _frame(_FrameType.ABANDON, _NONCE.pack(nonce))


class CommandStream:
    """Puts the frames of a stream together again, from pieces of any length."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[SenderCommand]:
        """Return the commands that `piece` completes, in order.

        Raises:
            InternalError: the stream holds something that is no frame.
        """
        self._buffer += piece
        commands: list[SenderCommand] = []
        while len(self._buffer) >= _FRAME.size:
            length, frame_type = _FRAME.unpack_from(self._buffer)
            end = _FRAME.size + length
            if len(self._buffer) < end:
                break
            commands.append(_decode_body(frame_type, bytes(self._buffer[_FRAME.size : end])))
            del self._buffer[:end]
        return commands


def _frame(frame_type: _FrameType, body: bytes) -> bytes:
    return _FRAME.pack(len(body), frame_type) + body


def _decode_body(frame_type: int, body: bytes) -> SenderCommand:
    match frame_type:
        case _FrameType.OPEN:
            return _decode_open(body)
        case _FrameType.PUSH:
            nonce, first = _PUSH.unpack_from(body)
            return PushBlocks(nonce, first, _unpack_ids(body[_PUSH.size :]))
        case _FrameType.FINISH:
            return FinishTicket(*_NONCE.unpack(body))
        case _FrameType.ABANDON:
            return AbandonTicket(*_NONCE.unpack(body))
        case _:
            raise InternalError(f"the ranks' command stream has a frame of type {frame_type}")


def _encode_open(command: OpenTicket) -> bytes:
    ticket, peer = command.ticket, command.peer
    request_id, name = ticket.request_id.encode(), peer.peer.encode()
    head = _OPEN.pack(
        ticket.nonce,
        ticket.epoch,
        ticket.fence_generation,
        ticket.slot,
        ticket.timeout_s,
        peer.fence_generation,
        peer.kv_region_bytes,
        peer.metadata_region_bytes,
        len(request_id),
        len(name),
        len(peer.endpoint),
    )
    return head + request_id + name + peer.endpoint + _pack_ids(ticket.block_ids)


def _decode_open(body: bytes) -> OpenTicket:
    (
        nonce,
        epoch,
        ticket_generation,
        slot,
        timeout_s,
        peer_generation,
        kv_region_bytes,
        metadata_region_bytes,
        *lengths,
    ) = _OPEN.unpack_from(body)
    parts: list[bytes] = []
    start = _OPEN.size
    for length in lengths:
        parts.append(body[start : start + length])
        start += length
    request_id, name, endpoint = parts
    ticket = SendTicket(
        request_id=request_id.decode(),
        nonce=nonce,
        epoch=epoch,
        block_ids=_unpack_ids(body[start:]),
        slot=slot,
        timeout_s=timeout_s,
        fence_generation=ticket_generation,
    )
    peer = PeerEndpoint(
        peer=name.decode(),
        endpoint=endpoint,
        kv_region_bytes=kv_region_bytes,
        metadata_region_bytes=metadata_region_bytes,
        fence_generation=peer_generation,
    )
    return OpenTicket(ticket, peer)


def _pack_ids(block_ids: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(block_ids)}I", *block_ids)


def _unpack_ids(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // _LENGTH_OF_ID}I", data)
