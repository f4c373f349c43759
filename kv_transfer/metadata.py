"""The metadata slot: a record (the first token and what belongs to it) and a flag per part.

A slot (little-endian; sizes follow from ``SlotLayout``, both sides compute the same):

    offset         type            field
    0              u64             nonce of the allocation; 0 is an empty slot
    8              u64             epoch of the decode process that allocated
    16             i32             first token id
    20             u32             bit 0: has logprobs
    24             f32             logprob of the first token
    28             u32             number of top ids
    32             u32             bytes of the MTP hidden state
    36             i32             draft of the token after the first; -1 for none
    40             u32             CRC-32 of bytes [0, 40) and of [44, flags_offset)
    44             i32[M]          top ids           (M = max_top_logprobs)
    44 + 4M        f32[M]          top logprobs
    44 + 8M        u8[H]           MTP hidden state  (H = mtp_hidden_bytes)
    flags_offset   (u64, u64)[P]   per part: nonce, epoch (P = max_parts; 16-byte aligned)

The key idea: each part writes its own flag as a write of its own, posted only when all its earlier
posts are DONE; part 0 also writes the record before its flag. So "all flags carry this nonce and
this epoch" proves that every byte is here, and needs no order within a post. A flag of another
allocation never matches, and a freed slot is zeroed.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kv_transfer.transport import MemoryRegion
from runtime.errors import OverloadedError, StaleTicketError, TransferFailedError
from runtime.sampling import PositionLogprobs

_HEADER = struct.Struct("<QQiIfIIi")
_CRC = struct.Struct("<I")
_FLAG = struct.Struct("<QQ")
_SLOT_NOTICE = struct.Struct("<I")
_HEADER_BYTES = _HEADER.size + _CRC.size
_HAS_LOGPROBS = 1
_SLOT_ALIGNMENT = 64

NO_DRAFT: Final = -1
"""In place of a token id: nobody has guessed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataRecord:
    """What decode needs besides the KV to go on where prefill stopped."""

    nonce: int
    epoch: int
    first_token: int
    logprobs: PositionLogprobs | None = None
    mtp_hidden: bytes = b""
    """The last hidden state, as the MTP layer takes it; empty without MTP."""
    first_draft: int = NO_DRAFT
    """What the MTP layer takes for the token after the first, sampled as that will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """Sizes of a slot; equal on both sides, as the model's configuration is."""

    max_top_logprobs: int = 20
    mtp_hidden_bytes: int = 0
    max_parts: int = 64

    @property
    def flags_offset(self) -> int:
        """Bytes from the slot's start to the flag of part 0; the record is what lies before."""
        end = _HEADER_BYTES + 8 * self.max_top_logprobs + self.mtp_hidden_bytes
        return -(-end // _FLAG.size) * _FLAG.size

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, also the stride between slots."""
        end = self.flags_offset + self.max_parts * _FLAG.size
        return -(-end // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT

    @property
    def flag_bytes(self) -> int:
        """Bytes of one part's flag."""
        return _FLAG.size

    def flag_offset(self, part: int) -> int:
        """Bytes from the slot's start to the flag of ``part``."""
        if not 0 <= part < self.max_parts:
            raise ValueError(f"part = {part}: a slot has flags for {self.max_parts} parts")
        return self.flags_offset + part * _FLAG.size


def encode_record(record: MetadataRecord, layout: SlotLayout) -> bytes:
    """``layout.flags_offset`` bytes for the start of a slot.

    Raises:
        ValueError: more top logprobs or a larger hidden state than the layout has room for.
    """
    logprobs = record.logprobs or PositionLogprobs(0.0)
    num_top = len(logprobs.top_ids)
    if num_top > layout.max_top_logprobs or num_top != len(logprobs.top_logprobs):
        raise ValueError(f"{num_top} top logprobs: a slot has room for {layout.max_top_logprobs}")
    if len(record.mtp_hidden) > layout.mtp_hidden_bytes:
        raise ValueError(
            f"MTP hidden state of {len(record.mtp_hidden)} bytes: "
            f"a slot has room for {layout.mtp_hidden_bytes}"
        )
    header = _HEADER.pack(
        record.nonce,
        record.epoch,
        record.first_token,
        _HAS_LOGPROBS if record.logprobs else 0,
        logprobs.logprob,
        num_top,
        len(record.mtp_hidden),
        record.first_draft,
    )
    padding = (0,) * (layout.max_top_logprobs - num_top)
    body = struct.pack(
        f"<{layout.max_top_logprobs}i{layout.max_top_logprobs}f",
        *logprobs.top_ids,
        *padding,
        *logprobs.top_logprobs,
        *padding,
    )
    body = (body + record.mtp_hidden).ljust(layout.flags_offset - _HEADER_BYTES, b"\0")
    return header + _CRC.pack(zlib.crc32(body, zlib.crc32(header))) + body


def decode_record(data: bytes, layout: SlotLayout) -> MetadataRecord:
    """The record that ``encode_record`` wrote into ``data``.

    Raises:
        TransferFailedError: the checksum or a count is wrong: torn or foreign bytes.
    """
    header, body = data[: _HEADER.size], data[_HEADER_BYTES : layout.flags_offset]
    (nonce, epoch, first_token, flags, logprob, num_top, hidden_bytes, first_draft) = (
        _HEADER.unpack(header)
    )
    (crc,) = _CRC.unpack_from(data, _HEADER.size)
    if crc != zlib.crc32(body, zlib.crc32(header)):
        raise TransferFailedError(f"metadata record of nonce {nonce:#x}: checksum mismatch")
    if num_top > layout.max_top_logprobs or hidden_bytes > layout.mtp_hidden_bytes:
        raise TransferFailedError(f"metadata record of nonce {nonce:#x}: counts out of range")
    top = layout.max_top_logprobs
    logprobs = None
    if flags & _HAS_LOGPROBS:
        top_ids = struct.unpack_from(f"<{num_top}i", body, 0)
        top_logprobs = struct.unpack_from(f"<{num_top}f", body, 4 * top)
        logprobs = PositionLogprobs(logprob, top_ids, top_logprobs)
    return MetadataRecord(
        nonce=nonce,
        epoch=epoch,
        first_token=first_token,
        logprobs=logprobs,
        mtp_hidden=body[8 * top : 8 * top + hidden_bytes],
        first_draft=first_draft,
    )


def encode_flag(nonce: int, epoch: int) -> bytes:
    """The flag of any part of this allocation."""
    return _FLAG.pack(nonce, epoch)


def encode_slot_notices(slots: Iterable[int]) -> bytes:
    """The notification that flags of ``slots`` were written."""
    return b"".join(map(_SLOT_NOTICE.pack, slots))


def decode_slot_notices(message: bytes) -> list[int]:
    """The slots of a notification; none where it is not one of ours."""
    if len(message) % _SLOT_NOTICE.size:
        return []
    return [slot for (slot,) in _SLOT_NOTICE.iter_unpack(message)]


@dataclass(frozen=True, slots=True)
class FlagState:
    """What the flags of a slot say about one allocation."""

    num_done: int
    num_stale: int
    """Flags that are neither empty nor ours: a late write of an earlier allocation."""


class SlotArray:
    """``num_slots`` slots in anonymous memory of their own, and who has which. Thread-safe.

    A slot belongs to the caller of ``allocate`` until ``free``, which zeroes it. Free a slot only
    when no writer can reach it any more (see ``ownership``). Also serves a sender as its staging
    memory.
    """

    def __init__(self, num_slots: int, layout: SlotLayout) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots = {num_slots}: must be at least 1")
        self.layout = layout
        self.num_slots = num_slots
        self._memory = mmap.mmap(-1, num_slots * layout.slot_bytes)
        self._lock = threading.Lock()
        self._free = list(range(num_slots - 1, -1, -1))
        self._owners: dict[int, int] = {}  # slot -> nonce
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @property
    def num_free(self) -> int:
        """Slots that can be allocated now."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.layout.slot_bytes

    def region(self, label: str) -> MemoryRegion:
        """The memory, for registration. It lives as long as this object."""
        return MemoryRegion(label, self._address, self.nbytes)

    def offset(self, slot: int) -> int:
        """Bytes from the region's start to ``slot``."""
        assert 0 <= slot < self.num_slots, slot
        return slot * self.layout.slot_bytes

    def address(self, slot: int) -> int:
        """Where ``slot`` begins."""
        return self._address + self.offset(slot)

    def allocate(self, nonce: int) -> int:
        """A zeroed slot for the allocation ``nonce`` (never 0).

        Raises:
            OverloadedError: no slot is free.
        """
        if nonce == 0:
            raise ValueError("nonce 0 means an empty slot")
        with self._lock:
            if not self._free:
                raise OverloadedError(
                    f"all {self.num_slots} metadata slots are in use. "
                    "Fix: retry later, or raise kv_transfer.num_metadata_slots"
                )
            slot = self._free.pop()
            self._owners[slot] = nonce
        return slot

    def free(self, slot: int) -> None:
        """Zero ``slot`` and make it allocatable."""
        with self._lock:
            assert slot in self._owners, f"slot {slot} is free already"
            start = self.offset(slot)
            self._memory[start : start + self.layout.slot_bytes] = bytes(self.layout.slot_bytes)
            del self._owners[slot]
            self._free.append(slot)

    def write(self, slot: int, offset: int, data: bytes) -> None:
        """Put ``data`` at ``offset`` of ``slot``: how a sender fills its staging memory."""
        assert 0 <= offset <= self.layout.slot_bytes - len(data), (offset, len(data))
        start = self.offset(slot) + offset
        self._memory[start : start + len(data)] = data

    def flags(self, slot: int, nonce: int, epoch: int, num_parts: int) -> FlagState:
        """How many of the first ``num_parts`` flags carry this nonce and epoch, and how many carry
        others.
        """
        start = self.offset(slot) + self.layout.flags_offset
        values = struct.unpack_from(f"<{2 * num_parts}Q", self._memory, start)
        num_done = num_stale = 0
        for found in zip(values[::2], values[1::2], strict=True):
            if found == (nonce, epoch):
                num_done += 1
            elif found[0] != 0 and found[0] != nonce:
                num_stale += 1
        return FlagState(num_done, num_stale)

    def read(self, slot: int, nonce: int, epoch: int) -> MetadataRecord:
        """The record in ``slot``, which must be of this allocation.

        Raises:
            StaleTicketError: it is of another allocation or epoch.
            TransferFailedError: it is damaged.
        """
        start = self.offset(slot)
        data = self._memory[start : start + self.layout.flags_offset]
        record = decode_record(data, self.layout)
        if (record.nonce, record.epoch) != (nonce, epoch):
            raise StaleTicketError(
                f"metadata slot {slot} holds nonce {record.nonce:#x} of epoch {record.epoch:#x}, "
                f"expected {nonce:#x} of {epoch:#x}"
            )
        return record

    def check_integrity(self) -> None:
        """Assert that each slot is free or owned, and that free ones are zero."""
        with self._lock:
            assert sorted([*self._free, *self._owners]) == list(range(self.num_slots))
            empty = bytes(self.layout.slot_bytes)
            for slot in self._free:
                start = self.offset(slot)
                assert self._memory[start : start + len(empty)] == empty, f"slot {slot} is dirty"
