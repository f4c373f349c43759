"""The states of posts, from ``post`` to ``release``. Thread-safe, because connections settle what
lanes poll.
"""

from __future__ import annotations

import threading

from kv_transfer.transport import TransferState
from runtime.errors import TandemError


class PostTable:
    """Every post that was started and not released."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_id = 1
        self._states: dict[int, TransferState] = {}
        self._errors: dict[int, TandemError] = {}

    def __len__(self) -> int:
        return len(self._states)

    def start(self) -> int:
        """A new post id, PENDING."""
        with self._lock:
            post_id = self._next_id
            self._next_id += 1
            self._states[post_id] = TransferState.PENDING
        return post_id

    def settle(self, post_id: int, error: TandemError | None) -> None:
        """DONE, or FAILED with ``error``. The first word stands."""
        with self._lock:
            if self._states.get(post_id) is TransferState.PENDING:
                failed = error is not None
                self._states[post_id] = TransferState.FAILED if failed else TransferState.DONE
                if error is not None:
                    self._errors[post_id] = error

    def state(self, post_id: int) -> TransferState:
        """Where the post stands. A released post is an error of the caller."""
        return self._states[post_id]

    def error(self, post_id: int) -> TandemError | None:
        """Why it FAILED."""
        return self._errors.get(post_id)

    def release(self, post_id: int) -> None:
        """Forget a post whose state is final."""
        with self._lock:
            state = self._states.pop(post_id)
            assert state is not TransferState.PENDING, "release of a pending post"
            self._errors.pop(post_id, None)
