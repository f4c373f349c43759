"""The decode rank's half of a hand-over: waits until every part of a request has arrived, and says
so once.

It writes nothing and moves nothing: the peers write into our blocks and slots. Its one thread
sleeps until the transport reports something, then looks at the slots that the notifications name.
Notifications are hints (they can be lost), so all awaited slots are looked at now and then; the
proof is in the slot (see ``metadata``).

Ownership: the slot that ``expect`` returns is the caller's until ``slots.free``; neither an arrival
nor ``forget`` frees it, because only the caller knows whether a writer can still reach it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kv_transfer.metadata import MetadataRecord, SlotArray, decode_slot_notices
from kv_transfer.transport import Transport
from runtime.errors import TandemError
from runtime.logging import get_logger

_SCAN_INTERVAL_S = 0.25  # looks at all awaited slots this often, in case a notification was lost
_JOIN_TIMEOUT_S = 10.0

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """All parts of one request are in our memory, or what they brought is unusable (``error``)."""

    request_id: str
    nonce: int
    slot: int
    record: MetadataRecord | None
    error: TandemError | None
    """The slot's record is damaged or foreign. All parts are done all the same: nobody writes any
    more."""
    waited_s: float
    """From ``expect`` to now."""


@dataclass(slots=True)
class _Expected:
    request_id: str
    nonce: int
    num_parts: int
    since: float
    num_stale: int = 0


class KVReceiver:
    """All awaited requests of one decode rank. ``on_arrival`` runs on the receiver's thread and
    must not block.

    ``expect``, ``forget`` and ``close`` may be called from any thread, also from inside
    ``on_arrival`` (but ``close``).
    """

    def __init__(
        self,
        transport: Transport,
        slots: SlotArray,
        *,
        epoch: int,
        on_arrival: Callable[[Arrival], None],
    ) -> None:
        self._transport = transport
        self._slots = slots
        self._epoch = epoch
        self._on_arrival = on_arrival
        self._condition = threading.Condition()
        self._expected: dict[int, _Expected] = {}  # by slot
        self._slot_of: dict[str, int] = {}  # by request id
        self._woken = False
        self._closing = False
        self._num_stale_flags = 0
        self._num_arrivals = 0
        self._thread = threading.Thread(target=self._run, name="kv-receiver", daemon=True)
        transport.add_listener(self._wake)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs that sees arrivals."""
        return self._thread.is_alive()

    @property
    def num_expected(self) -> int:
        """Requests that are still awaited."""
        return len(self._slot_of)

    @property
    def num_arrivals(self) -> int:
        """Requests that arrived so far."""
        return self._num_arrivals

    @property
    def num_stale_flags(self) -> int:
        """Flags of other allocations that were seen in awaited slots."""
        return self._num_stale_flags

    def expect(self, request_id: str, nonce: int, num_parts: int) -> int:
        """Await a request from ``num_parts`` parts; the metadata slot for its ticket.

        Raises:
            OverloadedError: no slot is free.
            ValueError: the request is awaited already, or too many parts.
        """
        if not 1 <= num_parts <= self._slots.layout.max_parts:
            limit = self._slots.layout.max_parts
            raise ValueError(f"num_parts = {num_parts}: must be in [1, {limit}]")
        with self._condition:
            if request_id in self._slot_of:
                raise ValueError(f"request {request_id} is awaited already")
            slot = self._slots.allocate(nonce)
            self._expected[slot] = _Expected(request_id, nonce, num_parts, time.monotonic())
            self._slot_of[request_id] = slot
            self._condition.notify()  # the thread sleeps without a timeout while nothing is awaited
        return slot

    def forget(self, request_id: str) -> bool:
        """Await the request no more. True: ``on_arrival`` will never be called for it.

        False: it was not awaited; its arrival was delivered or is being delivered at this moment.
        """
        with self._condition:
            slot = self._slot_of.pop(request_id, None)
            if slot is None:
                return False
            del self._expected[slot]
            return True

    def close(self) -> None:
        """Forget all requests and join the thread. Idempotent; slots stay with their owners."""
        self._transport.remove_listener(self._wake)
        with self._condition:
            self._closing = True
            self._expected.clear()
            self._slot_of.clear()
            self._condition.notify()
        self._thread.join(_JOIN_TIMEOUT_S)
        assert not self._thread.is_alive(), "on_arrival blocks"

    def _wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify()

    def _run(self) -> None:
        interval_s = self._transport.poll_interval_s or _SCAN_INTERVAL_S
        next_scan = 0.0
        while True:
            with self._condition:
                if not self._woken and not self._closing:
                    self._condition.wait(interval_s if self._expected else None)
                if self._closing:
                    return
                self._woken = False
            slots: Iterable[int] = self._noticed_slots()
            if time.monotonic() >= next_scan:
                next_scan = time.monotonic() + _SCAN_INTERVAL_S
                slots = self._awaited_slots()
            for slot in slots:
                self._check(slot)

    def _noticed_slots(self) -> set[int]:
        found: set[int] = set()
        for _, message in self._transport.notifications():
            found.update(decode_slot_notices(message))
        return found

    def _awaited_slots(self) -> Iterable[int]:
        with self._condition:
            return tuple(self._expected)

    def _check(self, slot: int) -> None:
        with self._condition:
            expected = self._expected.get(slot)
            if expected is None:
                return
            flags = self._slots.flags(slot, expected.nonce, self._epoch, expected.num_parts)
            self._num_stale_flags += max(0, flags.num_stale - expected.num_stale)
            expected.num_stale = max(flags.num_stale, expected.num_stale)
            if flags.num_done < expected.num_parts:
                return
            del self._expected[slot]
            del self._slot_of[expected.request_id]
            self._num_arrivals += 1
        self._deliver(slot, expected)

    def _deliver(self, slot: int, expected: _Expected) -> None:
        record, error = None, None
        try:
            record = self._slots.read(slot, expected.nonce, self._epoch)
        except TandemError as caught:
            caught.request_id = expected.request_id
            error = caught
        arrival = Arrival(
            request_id=expected.request_id,
            nonce=expected.nonce,
            slot=slot,
            record=record,
            error=error,
            waited_s=time.monotonic() - expected.since,
        )
        try:
            self._on_arrival(arrival)
        except Exception:
            # A failing callback must not end the thread that all other requests wait for.
            _log.exception("on_arrival failed for request %s", expected.request_id)
