"""Quarantine: the blocks of cancelled requests that a late write could still reach. Pure, with an
injected clock.

A decode rank that gives up on a ticket cannot free its blocks at once: the writer may have posted
already. The set stays here until every part (prefill rank) has said that it will write no more, or
until the writer was fenced:

    add -> close_part (each open part) | drained (all at once) -> Released
        -> due_for_fence -> [transport.fence(writer)] -> release_fenced -> Released

It is bounded by impatience, not by refusal: sets beyond ``max_blocks`` are due for fencing at once,
oldest first. Not thread-safe: it belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineEntry:
    """One allocation whose request is over while its writer may not be."""

    request_id: str
    nonce: int
    """Of the allocation; the key."""
    block_ids: tuple[int, ...]
    slot: int
    writer: str
    """Instance of the prefill worker; ``open_parts`` are its ranks."""
    open_parts: frozenset[int]
    since: float
    """Seconds of the injected clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Blocks and slot that nobody can write any more: free them now, once."""

    request_id: str
    nonce: int
    block_ids: tuple[int, ...]
    slot: int


class Quarantine:
    """All sets in quarantine of one decode rank."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        timeout_s: float,
        max_blocks: int,
        patience_s: float = 0.0,
    ) -> None:
        """Start empty.

        Args:
            clock: monotonic seconds.
            timeout_s: an entry that is older has to be fenced.
            max_blocks: beyond it the oldest have to be fenced too, so that the pool comes back;
            patience_s: but none that is younger. A burst of cancels makes many entries at once, and
                their writer is about to answer: a fence would cut its other transfers.
        """
        self._clock = clock
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._max_blocks = max_blocks
        self._entries: dict[int, QuarantineEntry] = {}  # by nonce, oldest first
        self._num_blocks = 0

    def __contains__(self, nonce: int) -> bool:
        return nonce in self._entries

    @property
    def num_entries(self) -> int:
        """Allocations in quarantine."""
        return len(self._entries)

    @property
    def num_blocks(self) -> int:
        """Blocks in quarantine."""
        return self._num_blocks

    def num_blocks_by(self, owner_of: Callable[[int], str]) -> dict[str, int]:
        """Blocks in quarantine by what ``owner_of`` says of their nonce."""
        counts: dict[str, int] = {}
        for nonce, entry in self._entries.items():
            owner = owner_of(nonce)
            counts[owner] = counts.get(owner, 0) + len(entry.block_ids)
        return counts

    @property
    def oldest_s(self) -> float:
        """Seconds that the oldest entry has been here; 0 when empty."""
        entry = next(iter(self._entries.values()), None)
        return self._clock() - entry.since if entry else 0.0

    def add(
        self,
        request_id: str,
        nonce: int,
        *,
        block_ids: Iterable[int],
        slot: int,
        writer: str,
        open_parts: Iterable[int],
    ) -> None:
        """Take over blocks and slot. ``open_parts``: those that have not closed the ticket yet, at
        least one.

        Raises:
            ValueError: no part is open (free the blocks instead), or the nonce is here already.
        """
        entry = QuarantineEntry(
            request_id=request_id,
            nonce=nonce,
            block_ids=tuple(block_ids),
            slot=slot,
            writer=writer,
            open_parts=frozenset(open_parts),
            since=self._clock(),
        )
        if not entry.open_parts:
            raise ValueError(f"request {request_id}: no part is open, nothing to wait for")
        if nonce in self._entries:
            raise ValueError(f"request {request_id}: nonce {nonce:#x} is in quarantine already")
        self._entries[nonce] = entry
        self._num_blocks += len(entry.block_ids)

    def close_part(self, nonce: int, part: int) -> Released | None:
        """``part`` will write no more. The set, if that was the last one; None otherwise or for an
        unknown nonce.
        """
        entry = self._entries.get(nonce)
        if entry is None:
            return None
        open_parts = entry.open_parts - {part}
        if not open_parts:
            return self._release(nonce)
        self._entries[nonce] = replace(entry, open_parts=open_parts)
        return None

    def drained(self, nonce: int) -> Released | None:
        """All parts will write no more (an answered Revoke). None for an unknown nonce."""
        return self._release(nonce) if nonce in self._entries else None

    def due_for_fence(self) -> list[QuarantineEntry]:
        """Entries that waited too long, and the oldest of those that make the quarantine too large.
        They stay here.
        """
        now = self._clock()
        excess = self._num_blocks - self._max_blocks
        due = []
        for entry in self._entries.values():
            age = now - entry.since
            if age < self._timeout_s and (excess <= 0 or age < self._patience_s):
                break
            due.append(entry)
            excess -= len(entry.block_ids)
        return due

    def nonces_of(self, writer: str) -> tuple[int, ...]:
        """What a fence of ``writer`` that starts now will make safe: take it before the fence,
        release after.
        """
        return tuple(n for n, entry in self._entries.items() if entry.writer == writer)

    def release_fenced(self, nonces: Iterable[int]) -> list[Released]:
        """The sets of ``nonces`` that are still here, after all connections of their writer were
        fenced.
        """
        return [self._release(nonce) for nonce in nonces if nonce in self._entries]

    def check_integrity(self) -> None:
        """Assert that the counts agree and that no block is here twice."""
        block_ids = [block for entry in self._entries.values() for block in entry.block_ids]
        assert len(block_ids) == self._num_blocks, (len(block_ids), self._num_blocks)
        assert len(set(block_ids)) == len(block_ids), "a block is in quarantine twice"

    def _release(self, nonce: int) -> Released:
        entry = self._entries.pop(nonce)
        self._num_blocks -= len(entry.block_ids)
        return Released(
            request_id=entry.request_id,
            nonce=nonce,
            block_ids=entry.block_ids,
            slot=entry.slot,
        )
