"""What a router process remembers of prefixes: the index, what it sent where, and conversations.

Blocks of a prompt that was sent to a prefill worker are expected there at once, so that prompts of
one prefix that come together go together; the worker's events confirm them. A conversation is bound
to the pair that served it last, which is found without hashing anything.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from router.pool.members import WorkerKey
from router.pool.prefix_index import Expectation, PrefixIndex

MAX_CONVERSATIONS = 1 << 16
EXPECTED_S = 2.0
"""Blocks are expected for so long after they should have been computed."""
EXPIRED_AT_ONCE = 4096
"""Blocks, or those of one prompt: what a pick may have to take back for others."""


class Binding(NamedTuple):
    """The pair that served a conversation last."""

    prefill: WorkerKey
    decode: WorkerKey


class Conversations:
    """The latest bindings, by salt and conversation id: tenants have nothing in common."""

    def __init__(self, most: int = MAX_CONVERSATIONS) -> None:
        self._most = most
        self._bindings: OrderedDict[tuple[str, str], Binding] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bindings)

    def get(self, salt: str, conversation: str) -> Binding | None:
        """The binding; None where there is none. It counts as used now."""
        binding = self._bindings.get((salt, conversation))
        if binding is not None:
            self._bindings.move_to_end((salt, conversation))
        return binding

    def bind(self, salt: str, conversation: str, binding: Binding) -> None:
        """Remember; the one that was used least recently makes room."""
        self._bindings[salt, conversation] = binding
        self._bindings.move_to_end((salt, conversation))
        if len(self._bindings) > self._most:
            self._bindings.popitem(last=False)


class Prefixes:
    """One event loop owns it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.index = PrefixIndex()
        self.conversations = Conversations()
        self._clock = clock
        self._sent: deque[tuple[float, Expectation]] = deque()

    def expect(self, key: WorkerKey, block_hashes: Sequence[bytes], within_s: float) -> None:
        """A prefill worker was picked: it should have these blocks within so many seconds."""
        expectation = self.index.expect(key, block_hashes)
        if expectation is not None:
            self._sent.append((self._clock() + within_s + EXPECTED_S, expectation))

    def expire(self) -> None:
        """Expect no more what should be there by now; call it before lookups.

        After a pause there may be much of it: the rest is left to the next calls.
        """
        now, num_blocks = self._clock(), 0
        while self._sent and self._sent[0][0] <= now and num_blocks < EXPIRED_AT_ONCE:
            _, expectation = self._sent.popleft()
            num_blocks += len(expectation.block_hashes)
            self.index.unexpect(expectation)
