"""The metadata slot: encoding, damage, flags of other allocations, zero on free."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.metadata import (
    MetadataRecord,
    SlotArray,
    SlotLayout,
    decode_record,
    decode_slot_notices,
    encode_flag,
    encode_record,
    encode_slot_notices,
)
from runtime.errors import OverloadedError, StaleTicketError, TransferFailedError
from runtime.sampling import PositionLogprobs

LAYOUT = SlotLayout(max_top_logprobs=3, mtp_hidden_bytes=10, max_parts=4)

u64 = st.integers(1, 2**64 - 1)
f32 = st.floats(width=32, allow_nan=False)
records = st.builds(
    MetadataRecord,
    nonce=u64,
    epoch=u64,
    first_token=st.integers(0, 2**31 - 1),
    logprobs=st.none()
    | st.builds(
        lambda logprob, top: PositionLogprobs(
            logprob, tuple(i for i, _ in top), tuple(p for _, p in top)
        ),
        f32,
        st.lists(st.tuples(st.integers(0, 2**31 - 1), f32), max_size=3),
    ),
    mtp_hidden=st.binary(max_size=10),
    first_draft=st.integers(-1, 2**31 - 1),
)


@given(record=records)
def test_round_trip(record: MetadataRecord) -> None:
    data = encode_record(record, LAYOUT)
    assert len(data) == LAYOUT.flags_offset
    assert decode_record(data, LAYOUT) == record


@given(record=records, position=st.integers(0, LAYOUT.flags_offset - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_taken_for_a_record(
    record: MetadataRecord, position: int, bit: int
) -> None:
    data = bytearray(encode_record(record, LAYOUT))
    data[position] ^= 1 << bit
    with pytest.raises(TransferFailedError, match="checksum"):
        decode_record(bytes(data), LAYOUT)


def test_what_does_not_fit_is_refused() -> None:
    record = MetadataRecord(nonce=1, epoch=1, first_token=0, mtp_hidden=bytes(11))
    with pytest.raises(ValueError, match="11 bytes"):
        encode_record(record, LAYOUT)
    four = PositionLogprobs(0.0, (1, 2, 3, 4), (0.0,) * 4)
    with pytest.raises(ValueError, match="4 top logprobs"):
        encode_record(MetadataRecord(nonce=1, epoch=1, first_token=0, logprobs=four), LAYOUT)


def test_slots_do_not_overlap_and_flags_are_inside() -> None:
    assert LAYOUT.flag_offset(3) + LAYOUT.flag_bytes <= LAYOUT.slot_bytes
    assert LAYOUT.flags_offset % LAYOUT.flag_bytes == 0
    with pytest.raises(ValueError, match="part = 4"):
        LAYOUT.flag_offset(4)


def test_flags_count_only_this_allocation() -> None:
    slots = SlotArray(2, LAYOUT)
    slot = slots.allocate(nonce=5)
    slots.write(slot, LAYOUT.flag_offset(0), encode_flag(5, 9))
    slots.write(slot, LAYOUT.flag_offset(1), encode_flag(4, 9))  # another allocation
    slots.write(slot, LAYOUT.flag_offset(2), encode_flag(5, 8))  # another life of the process
    state = slots.flags(slot, 5, 9, num_parts=4)
    assert (state.num_done, state.num_stale) == (1, 1)


def test_a_foreign_record_is_stale() -> None:
    slots = SlotArray(1, LAYOUT)
    slot = slots.allocate(nonce=5)
    record = MetadataRecord(nonce=4, epoch=9, first_token=1)
    slots.write(slot, 0, encode_record(record, LAYOUT))
    with pytest.raises(StaleTicketError, match="0x4"):
        slots.read(slot, 5, 9)


def test_a_freed_slot_is_zero_and_counted() -> None:
    slots = SlotArray(2, LAYOUT)
    first, second = slots.allocate(1), slots.allocate(2)
    with pytest.raises(OverloadedError, match="all 2 metadata slots"):
        slots.allocate(3)
    slots.write(first, 0, b"\xff" * LAYOUT.slot_bytes)
    slots.free(first)
    slots.check_integrity()
    assert slots.num_free == 1
    memory = ctypes.string_at(slots.address(first), LAYOUT.slot_bytes)
    assert memory == bytes(LAYOUT.slot_bytes)
    with pytest.raises(AssertionError, match="free already"):
        slots.free(first)
    slots.free(second)


def test_nonce_zero_is_no_allocation() -> None:
    with pytest.raises(ValueError, match="nonce 0"):
        SlotArray(1, LAYOUT).allocate(0)


def test_notices_round_trip_and_foreign_ones_are_empty() -> None:
    assert decode_slot_notices(encode_slot_notices([3, 70000])) == [3, 70000]
    assert decode_slot_notices(b"abc") == []
