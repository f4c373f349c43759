"""Which blocks one rank holds, as a list that is cheap to keep: appended to, and tidied bit by bit.

A set of each rank's own would take four times the memory, and nobody asks whether one rank holds
one block: the index knows that. The list is for whoever needs all of them, which is rare. It has
each block at least once, and some that were held before; once these are the most, it is written
anew, a few entries with each change, so that no change waits for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

SLACK = 1024
"""Entries that may be stale whatever the rank holds."""
PACE = 4
"""Entries that are looked at for each block of a change, while the list is written anew."""


class BlockLog:
    """Blocks of one rank."""

    __slots__ = ("_next", "_old", "_seen", "_written")

    def __init__(self) -> None:
        self._written: list[bytes] = []
        self._old: list[bytes] = []
        """Being written anew, from ``_next`` on."""
        self._next = 0
        self._seen: set[bytes] | None = None
        """In ``_written``, while something is written anew."""

    def __len__(self) -> int:
        """Entries, stale ones included."""
        return len(self._written) + len(self._old) - self._next

    def __iter__(self) -> Iterator[bytes]:
        """All entries."""
        yield from self._written
        for number in range(self._next, len(self._old)):
            yield self._old[number]

    def append(self, block_hash: bytes) -> None:
        """The rank holds it now."""
        self._written.append(block_hash)
        if self._seen is not None:
            self._seen.add(block_hash)

    def take(self, most: int) -> list[bytes]:
        """Take out at most so many entries; none: it is empty."""
        if not self._written:  # who takes all may take some twice
            self._written, self._old, self._next, self._seen = self._old, [], 0, None
        taken = self._written[-most:]
        del self._written[-most:]
        return taken

    def tidy(self, num_changed: int, num_held: int, is_held: Callable[[bytes], object]) -> None:
        """Drop some stale entries, if there are many.

        Args:
            num_changed: blocks of the change that was made just now.
            num_held: blocks that the rank holds.
            is_held: whether it holds one.
        """
        if self._seen is None:
            if len(self._written) <= 2 * num_held + SLACK:
                return
            self._old, self._written = self._written, []
            self._next, self._seen = 0, set()
        written, seen = self._written, self._seen
        end = min(len(self._old), self._next + PACE * num_changed)
        for number in range(self._next, end):
            block_hash = self._old[number]
            if block_hash not in seen and is_held(block_hash):
                seen.add(block_hash)
                written.append(block_hash)
        self._next = end
        if end == len(self._old):
            self._old, self._next, self._seen = [], 0, None
