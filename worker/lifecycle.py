"""The states of a request in each role and the legal moves between them.

One table a role. Every move goes through ``check_transition``, so that an impossible order of
events is an error at the place where it happens and not a leak found later.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from runtime.errors import InternalError


class PrefillStatus(enum.Enum):
    """A request in a prefill worker."""

    WAITING = "waiting"
    """Accepted; no block is held, here or in decode."""
    CLAIMING = "claiming"
    """Holds the blocks of its whole context; decode is asked for the ticket."""
    RUNNING = "running"
    """Holds its blocks and a ticket; chunks are computed, finished ones are being sent."""
    SENDING = "sending"
    """First token answered; sender threads still read the blocks."""
    FINISHED = "finished"
    """Drained: no thread reads the blocks; they are released."""


class DecodeStatus(enum.Enum):
    """A request in a decode rank."""

    RESERVED = "reserved"
    """Has a place and a nonce; nothing is held, and prefill has not asked for it."""
    CLAIMED = "claimed"
    """Prefill asked for it; queued for blocks."""
    WAITING_FOR_KV = "waiting_for_kv"
    """Blocks and metadata slot are held; a writer may be writing."""
    WAITING = "waiting"
    """KV complete; not yet in a step."""
    RUNNING = "running"
    OFFLOADING = "offloading"
    """Preempted; its KV is on its way to host memory, and its blocks are held until it is there."""
    PREEMPTED = "preempted"
    """Its KV lies in host memory; it holds no block."""
    FINISHED = "finished"
    """Answered. Its blocks are released, or in quarantine while a writer may still write."""


PREFILL_TRANSITIONS: Mapping[PrefillStatus, frozenset[PrefillStatus]] = {
    PrefillStatus.WAITING: frozenset({PrefillStatus.CLAIMING, PrefillStatus.FINISHED}),
    PrefillStatus.CLAIMING: frozenset({PrefillStatus.RUNNING, PrefillStatus.FINISHED}),
    # RUNNING ends in SENDING also when cancelled: finished chunks may still be in flight.
    PrefillStatus.RUNNING: frozenset({PrefillStatus.SENDING}),
    PrefillStatus.SENDING: frozenset({PrefillStatus.FINISHED}),
    PrefillStatus.FINISHED: frozenset(),
}

DECODE_TRANSITIONS: Mapping[DecodeStatus, frozenset[DecodeStatus]] = {
    DecodeStatus.RESERVED: frozenset({DecodeStatus.CLAIMED, DecodeStatus.FINISHED}),
    # Back to RESERVED where the call that claimed it is cancelled while it is queued.
    DecodeStatus.CLAIMED: frozenset(
        {DecodeStatus.RESERVED, DecodeStatus.WAITING_FOR_KV, DecodeStatus.FINISHED}
    ),
    DecodeStatus.WAITING_FOR_KV: frozenset({DecodeStatus.WAITING, DecodeStatus.FINISHED}),
    # WAITING again where it leaves its place in the steps to a tier before its own; so parked, it
    # may have to leave its blocks, too.
    DecodeStatus.WAITING: frozenset(
        {DecodeStatus.RUNNING, DecodeStatus.OFFLOADING, DecodeStatus.FINISHED}
    ),
    DecodeStatus.RUNNING: frozenset(
        {DecodeStatus.WAITING, DecodeStatus.OFFLOADING, DecodeStatus.FINISHED}
    ),
    DecodeStatus.OFFLOADING: frozenset({DecodeStatus.PREEMPTED, DecodeStatus.FINISHED}),
    DecodeStatus.PREEMPTED: frozenset({DecodeStatus.RUNNING, DecodeStatus.FINISHED}),
    DecodeStatus.FINISHED: frozenset(),
}


def check_transition(
    old: PrefillStatus | DecodeStatus, new: PrefillStatus | DecodeStatus, request_id: str
) -> None:
    """Raise InternalError unless ``old`` may become ``new``."""
    if isinstance(old, PrefillStatus):
        legal = new in PREFILL_TRANSITIONS[old]
    else:
        legal = new in DECODE_TRANSITIONS[old]
    if not legal:
        step = f"{type(old).__name__} {old.value} -> {new.value}"
        raise InternalError(f"illegal transition {step}", request_id=request_id)
