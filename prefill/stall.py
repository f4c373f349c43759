"""How long the engine loop is held up by KV work: the time of its calls into the sender, per step.

Those calls only enqueue, so a step should lose microseconds; a lock that is held too long or a
transport that blocks would show here first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kv_transfer.metadata import MetadataRecord
from kv_transfer.ticket import PeerEndpoint, SendTicket
from prefill.kv_push import ReadyCheck
from prefill.sender_group import TicketSender


class StallMeter:
    """A `TicketSender` that passes every call on and takes its time. Used on one thread."""

    def __init__(
        self, sender: TicketSender, observe: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """`observe` is told the seconds of each step that made a call."""
        self._sender = sender
        self._observe = observe
        self._step_s = 0.0
        self.longest_s = 0.0
        """Of all steps so far."""

    def open(self, ticket: SendTicket, peer: PeerEndpoint) -> None:
        """See `TicketSender`, as the next three."""
        with self._timed():
            self._sender.open(ticket, peer)

    def push(
        self,
        nonce: int,
        src_block_ids: Sequence[int],
        first_block_index: int,
        *,
        layers: tuple[int, int],
        ready: ReadyCheck | None,
    ) -> None:
        """Called while the step runs."""
        with self._timed():
            self._sender.push(nonce, src_block_ids, first_block_index, layers=layers, ready=ready)

    def finish(self, nonce: int, record: MetadataRecord | None) -> None:
        """Called after the step."""
        with self._timed():
            self._sender.finish(nonce, record)

    def abandon(self, nonce: int) -> None:
        """Called between steps; counts for the next one."""
        with self._timed():
            self._sender.abandon(nonce)

    def end_step(self) -> None:
        """Report the step, if it made a call."""
        step_s, self._step_s = self._step_s, 0.0
        if step_s:
            self.longest_s = max(self.longest_s, step_s)
            self._observe(step_s)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._step_s += time.perf_counter() - start
