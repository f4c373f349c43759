"""The control socket of a paired connection, after the hello. Bytes of the KV never pass here.

    sender -> receiver    WHO (process identity, JSON), then NOTIFY (message) ..., at last BYE
    receiver -> sender    OFFER (library, address, regions, JSON) or ERROR (text), at last FENCE

Each frame is a kind (u8), a length (u32) and so many bytes. BYE means: our instance of the library
is destroyed, we write no more. FENCE means: destroy it now and say BYE.
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import dataclass

from kv_transfer.transport import MemoryRegion
from kv_transfer.transports.hello import WireError, receive
from kv_transfer.transports.loopback.wire import MAX_NOTIFY_BYTES
from kv_transfer.transports.sockets import ByteSocket
from runtime.parsing import parse_json

_HEAD = struct.Struct("<BI")


class FrameKind(enum.IntEnum):
    """What a frame says."""

    WHO = 1
    OFFER = 2
    ERROR = 3
    NOTIFY = 4
    FENCE = 5
    BYE = 6


_MAX_BYTES = {
    FrameKind.WHO: 1 << 12,
    FrameKind.OFFER: 1 << 20,  # a library's address may hold keys of every region and device
    FrameKind.ERROR: 1 << 14,
    FrameKind.NOTIFY: MAX_NOTIFY_BYTES,
    FrameKind.FENCE: 0,
    FrameKind.BYE: 0,
}


@dataclass(frozen=True, slots=True)
class Offer:
    """What a receiver lets one connection write."""

    library: str
    address: bytes
    regions: tuple[MemoryRegion, ...]

    def encode(self) -> bytes:
        """For an OFFER frame."""
        regions = [[r.label, r.address, r.nbytes, r.device, r.scratch_bytes] for r in self.regions]
        values = {"library": self.library, "address": self.address.hex(), "regions": regions}
        return json.dumps(values).encode()

    @classmethod
    def decode(cls, data: bytes) -> Offer:
        """What ``encode`` wrote.

        Raises:
            WireError: it is no offer.
        """
        try:
            values = parse_json(data)
            regions = tuple(
                MemoryRegion(
                    str(label),
                    int(address),
                    int(nbytes),
                    device=None if device is None else int(device),
                    scratch_bytes=int(scratch),
                )
                for label, address, nbytes, device, scratch in values["regions"]
            )
            return cls(str(values["library"]), bytes.fromhex(values["address"]), regions)
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            raise WireError(f"not an offer: {error!r}") from error


def send_frame(sock: ByteSocket, kind: FrameKind, payload: bytes = b"") -> None:
    """Send one frame; frames of several threads must be kept apart by the caller."""
    payload = payload[: _MAX_BYTES[kind]] if kind is FrameKind.ERROR else payload
    sock.sendall(_HEAD.pack(kind, len(payload)) + payload)


def receive_frame(sock: ByteSocket) -> tuple[FrameKind, bytes]:
    """The next frame.

    Raises:
        WireError: the connection ended, or this is no frame.
    """
    number, nbytes = _HEAD.unpack(receive(sock, _HEAD.size))
    if number not in _MAX_BYTES or nbytes > _MAX_BYTES[FrameKind(number)]:
        raise WireError(f"frame of kind {number} with {nbytes} bytes")
    return FrameKind(number), receive(sock, nbytes)
