"""The driver's structures have the layout of its header."""

import ctypes

from engine.parallel.symmetric_driver import _StreamOperation


def test_stream_operations_lie_as_the_driver_reads_them() -> None:
    """Six 64-bit words; the operation is a tag in the first, the flags stand behind the value."""
    assert ctypes.sizeof(_StreamOperation) == 48
    words = (ctypes.c_uint64 * 12).from_buffer(
        (_StreamOperation * 2)(
            _StreamOperation(2, 0x1234567890, 0xFFFFFFFF, 0), _StreamOperation(1, 7, 5, 3)
        )
    )
    assert list(words) == [2, 0x1234567890, 0xFFFFFFFF, 0, 0, 0, 1, 7, 5, 3, 0, 0]
