"""The order of a collective over symmetric memory, as data: who copies what, after which signal.

Nothing here touches a device. `all_gather` and `reduce_scatter` list what one rank does for its
n-th collective of that kind, stream by stream; `symmetric.py` gives the list to the driver, and a
test plays all ranks' lists in any order and looks for overwritten buffers and for deadlocks.

A *slot* is one of `num_slots` places for a collective's data in every rank's symmetric buffer. The
n-th collective of a kind takes slot n mod `num_slots`; its *generation*, n // `num_slots` + 1, is
the number of the slot's use. A signal is a counter in the receiver's memory that only its one
sender writes, and only with ascending generations; a wait is for "this generation or later".

All-gather by pulling. A rank copies its rows into its own slot, and peers read them from there
straight into their results, which are ordinary tensors: a caller may keep a result for ever.

    stage     wait DRAINED(slot, all peers, generation - 1); own rows -> slot; put READY(all); own
              rows -> result
    transfer  per peer: wait READY(peer, generation); peer's slot -> result; put DRAINED(peer)

    Why the slot is not overwritten while a peer reads it: the rank writes its slot only after every
    peer's DRAINED of the generation before, which a peer puts on the stream of its read, behind it.
    Why a peer reads no old rows: READY is put on the stream of the write, behind it, and holds this
    generation.

Reduce-scatter by pushing. A rank writes slice j of its partial sums into rank j's slot, at a place
of its own; rank j sums what arrived. The source is an ordinary tensor.

    transfer  per peer: wait FREE(peer, generation - 1); slice -> peer's slot; put ARRIVED(peer)
    reduce    wait ARRIVED(all peers, generation); slot + own slice -> result; put FREE(all)

    Why no place is overwritten before it was summed: its one writer writes after the owner's FREE
    of the generation before, which the owner puts on the stream of the sum, behind it. The own
    slice is summed where it is.
    Why the sum reads no old slice: ARRIVED is put on the stream of the write, behind it.

Why nothing waits for ever: all ranks start their collectives in one order (program order), and each
wait of collective n is for a signal of n, or of n - `num_slots`. So among the collectives that are
not done somewhere, the first waits for nothing but itself. That also holds when streams share a
hardware queue, which runs its work in the order of launching: a stream then waits for collectives
that were started earlier, never for later ones.

Rotated order: in step i rank r serves rank r + i, so that every link carries one copy at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

STAGE, REDUCE, FIRST_TRANSFER = 0, 1, 2
"""Numbers of the streams; the transfer streams follow from the last."""
_WRAP = 2**32


class Kind(IntEnum):
    """What a step does."""

    WAIT = 0
    PUT = 1
    FILL = 2
    """All-gather: own rows into the own slot."""
    KEEP = 3
    """All-gather: own rows into the result."""
    PULL = 4
    """A peer's slot into the result."""
    PUSH = 5
    """A slice into a peer's slot."""
    SUM = 6
    """The own slot's slices and the own slice into the result."""


class Signal(IntEnum):
    """What a counter tells its reader."""

    READY = 0
    DRAINED = 1
    ARRIVED = 2
    FREE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that a rank launches on one of its streams.

    Attributes:
        kind: what.
        stream: STAGE, REDUCE or a transfer stream.
        peers: the ranks that it concerns; none for what a rank does alone.
        channel: number of the counter, for WAIT and PUT; its slot is part of it.
        generation: what is put, or waited for, modulo 2**32.
    """

    kind: Kind
    stream: int
    peers: tuple[int, ...] = ()
    channel: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps of one rank among `size`, with `num_slots` slots and `num_transfers` streams."""

    rank: int
    size: int
    num_slots: int
    num_transfers: int

    @property
    def num_streams(self) -> int:
        """Side streams that a rank uses."""
        return FIRST_TRANSFER + self.num_transfers

    @property
    def transfers(self) -> range:
        """Numbers of the transfer streams."""
        return range(FIRST_TRANSFER, self.num_streams)

    @property
    def num_channels(self) -> int:
        """Counters that a rank has for each peer."""
        return len(Signal) * self.num_slots

    def slot(self, number: int) -> int:
        """Return the slot of the collective with this number, counted per kind from 0."""
        return number % self.num_slots

    def all_gather(self, number: int) -> Iterator[Step]:
        """Yield the steps in the order of launching."""
        peers = self._peers()
        yield from self._wait_for_slot(STAGE, Signal.DRAINED, number, peers)
        yield Step(kind=Kind.FILL, stream=STAGE)
        yield self._signal(Kind.PUT, STAGE, Signal.READY, number, peers)
        yield Step(kind=Kind.KEEP, stream=STAGE)
        for stream, peer in self._transfers(peers):
            yield self._signal(Kind.WAIT, stream, Signal.READY, number, (peer,))
            yield Step(kind=Kind.PULL, stream=stream, peers=(peer,))
            yield self._signal(Kind.PUT, stream, Signal.DRAINED, number, (peer,))

    def reduce_scatter(self, number: int) -> Iterator[Step]:
        """Yield the steps in the order of launching."""
        peers = self._peers()
        for stream, peer in self._transfers(peers):
            yield from self._wait_for_slot(stream, Signal.FREE, number, (peer,))
            yield Step(kind=Kind.PUSH, stream=stream, peers=(peer,))
            yield self._signal(Kind.PUT, stream, Signal.ARRIVED, number, (peer,))
        yield self._signal(Kind.WAIT, REDUCE, Signal.ARRIVED, number, peers)
        yield Step(kind=Kind.SUM, stream=REDUCE)
        yield self._signal(Kind.PUT, REDUCE, Signal.FREE, number, peers)

    def _peers(self) -> tuple[int, ...]:
        return tuple((self.rank + i) % self.size for i in range(1, self.size))

    def _transfers(self, peers: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        for i, peer in enumerate(peers):
            yield FIRST_TRANSFER + i % self.num_transfers, peer

    def _wait_for_slot(
        self, stream: int, signal: Signal, number: int, peers: tuple[int, ...]
    ) -> Iterator[Step]:
        """Wait for the end of the slot's use before; the first use waits for nothing."""
        if number >= self.num_slots:
            yield self._signal(Kind.WAIT, stream, signal, number - self.num_slots, peers)

    def _signal(
        self, kind: Kind, stream: int, signal: Signal, number: int, peers: tuple[int, ...]
    ) -> Step:
        return Step(
            kind=kind,
            stream=stream,
            peers=peers,
            channel=signal * self.num_slots + self.slot(number),
            generation=(number // self.num_slots + 1) % _WRAP,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlan:
    """Where things lie in every rank's symmetric buffer; offsets and sizes in bytes.

    Counters first, then the slots of reduce-scatter, then those of all-gather: a slot of the first
    holds a slice of every peer, a slot of the second the rows of one rank.

    Attributes:
        size: ranks.
        num_slots: of each kind.
        num_channels: counters per rank and peer.
        max_bytes: most bytes of a reduce-scatter's input, and of an all-gather's result.
    """

    size: int
    num_slots: int
    num_channels: int
    max_bytes: int

    @property
    def slice_bytes(self) -> int:
        """Most bytes of one rank's part."""
        return self.max_bytes // self.size

    @property
    def counter_bytes(self) -> int:
        """Of all counters, in whole pages."""
        return _round_up(4 * self.num_channels * self.size, 4096)

    @property
    def nbytes(self) -> int:
        """Of the buffer."""
        return self.all_gather_slot(self.num_slots)

    def counter(self, channel: int, sender: int) -> int:
        """Return the offset of the 32-bit counter that `sender` writes in its reader's buffer."""
        return 4 * (channel * self.size + sender)

    def reduce_slot(self, slot: int) -> int:
        """Return the offset of a slot of reduce-scatter."""
        return self.counter_bytes + slot * self._aligned_slice * (self.size - 1)

    def place(self, sender: int, owner: int) -> int:
        """Return which of the places in an `owner`'s slot is the `sender`'s, from 0."""
        return sender - (sender > owner)

    def all_gather_slot(self, slot: int) -> int:
        """Return the offset of a slot of all-gather."""
        return self.reduce_slot(self.num_slots) + slot * self._aligned_slice

    @property
    def _aligned_slice(self) -> int:
        return _round_up(self.slice_bytes, 512)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
