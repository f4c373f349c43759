"""KVReceiver: exactly one arrival per expected request, whatever else is in the slot."""

from __future__ import annotations

import pytest

from kv_transfer.metadata import MetadataRecord, encode_flag, encode_record
from runtime.errors import OverloadedError, TransferFailedError
from tests.kv_transfer.helpers import SLOT_LAYOUT, DecodeSide
from tests.waiting import wait_until


def write_flag(decode: DecodeSide, slot: int, part: int, nonce: int = 7) -> None:
    flag = encode_flag(nonce, decode.epoch)
    decode.slots.write(slot, SLOT_LAYOUT.flag_offset(part), flag)


def write_record(decode: DecodeSide, slot: int, nonce: int = 7) -> None:
    record = MetadataRecord(nonce=nonce, epoch=decode.epoch, first_token=11)
    decode.slots.write(slot, 0, encode_record(record, SLOT_LAYOUT))


def test_arrives_when_the_last_part_is_there_even_without_notification(decode: DecodeSide) -> None:
    slot = decode.receiver.expect("r", 7, num_parts=3)
    write_record(decode, slot)
    write_flag(decode, slot, 0)
    write_flag(decode, slot, 2)
    assert decode.receiver.num_expected == 1
    write_flag(decode, slot, 1)
    arrival = decode.arrival()
    assert (arrival.request_id, arrival.nonce, arrival.slot) == ("r", 7, slot)
    assert arrival.error is None
    assert arrival.record is not None
    assert arrival.record.first_token == 11
    assert decode.receiver.num_expected == 0
    assert not decode.receiver.forget("r")
    assert decode.slots.num_free == decode.slots.num_slots - 1
    decode.slots.free(slot)


def test_a_stale_flag_is_ignored_and_counted_once(decode: DecodeSide) -> None:
    slot = decode.receiver.expect("r", 7, num_parts=1)
    write_record(decode, slot, nonce=6)
    write_flag(decode, slot, 0, nonce=6)
    wait_until(lambda: decode.receiver.num_stale_flags == 1)
    assert decode.arrivals.empty()
    write_record(decode, slot)
    write_flag(decode, slot, 0)
    assert decode.arrival().error is None
    assert decode.receiver.num_stale_flags == 1


def test_a_damaged_record_is_an_error_not_a_token(decode: DecodeSide) -> None:
    slot = decode.receiver.expect("r", 7, num_parts=1)
    write_record(decode, slot)
    decode.slots.write(slot, 16, b"\x05")
    write_flag(decode, slot, 0)
    arrival = decode.arrival()
    assert arrival.record is None
    assert isinstance(arrival.error, TransferFailedError)
    assert arrival.error.request_id == "r"


def test_forget_means_no_arrival(decode: DecodeSide) -> None:
    slot = decode.receiver.expect("r", 7, num_parts=1)
    other = decode.receiver.expect("other", 8, num_parts=1)
    assert decode.receiver.forget("r")
    assert not decode.receiver.forget("r")
    for nonce, each in ((7, slot), (8, other)):
        write_record(decode, each, nonce)
        write_flag(decode, each, 0, nonce)
    assert decode.arrival().request_id == "other"
    assert decode.arrivals.empty()
    assert decode.receiver.num_arrivals == 1


def test_refusals(decode: DecodeSide) -> None:
    decode.receiver.expect("r", 7, num_parts=1)
    with pytest.raises(ValueError, match="awaited already"):
        decode.receiver.expect("r", 8, num_parts=1)
    for num_parts in (0, SLOT_LAYOUT.max_parts + 1):
        with pytest.raises(ValueError, match="num_parts"):
            decode.receiver.expect("s", 9, num_parts=num_parts)
    for index in range(decode.slots.num_free):
        decode.receiver.expect(f"full-{index}", 100 + index, num_parts=1)
    with pytest.raises(OverloadedError, match="metadata slots"):
        decode.receiver.expect("one too many", 99, num_parts=1)


def test_a_failing_callback_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    decode = DecodeSide()
    try:
        calls = []

        def fail_once(arrival: object) -> None:
            calls.append(arrival)
            if len(calls) == 1:
                raise RuntimeError("callback")

        decode.receiver._on_arrival = fail_once
        for nonce in (7, 8):
            slot = decode.receiver.expect(f"r{nonce}", nonce, num_parts=1)
            write_record(decode, slot, nonce)
            write_flag(decode, slot, 0, nonce)
        wait_until(lambda: len(calls) == 2)
        assert "on_arrival failed for request r" in caplog.text
    finally:
        decode.close()
