"""Threads for text: parsing, rendering and tokenizing of long requests, off the event loop.

Short work is done at once, where the caller is: faster than the way to a thread and back. Long work
has one thread of its own, so that who sends the longest texts waits for the like and not others for
him. Work whose caller has left is dropped where it waits, and told so where it runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_BYTES = 4 * 2**10
LONG_BYTES = 64 * 2**10
NUM_SHORT = 2

T = TypeVar("T")
Work = Callable[[Callable[[], bool]], T]
"""Its argument says whether the caller has left: the result then does not matter."""


class Lanes:
    """The threads of one process. One event loop owns them."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(NUM_SHORT, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-text")
        self._num_pending = 0

    @property
    def num_pending(self) -> int:
        """Pieces of work that wait or run in threads and are waited for."""
        return self._num_pending

    async def run(self, num_bytes: int, work: Work[T]) -> T:
        """The result of ``work``, whose cost grows with ``num_bytes``."""
        if num_bytes <= INLINE_BYTES:
            return work(lambda: False)
        left = threading.Event()
        executor = self._short if num_bytes <= LONG_BYTES else self._long
        self._num_pending += 1
        try:
            # Cancelling the wait takes work that has not begun out of the executor.
            return await asyncio.get_running_loop().run_in_executor(executor, work, left.is_set)
        finally:
            left.set()
            self._num_pending -= 1

    def close(self) -> None:
        """Take nothing more; what waits is dropped."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)
