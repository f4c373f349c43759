"""Threads for text: parsing, rendering and tokenizing of long requests, off the event loop.

Short work is done at once, where the caller is: faster than the way to a thread and back. Long work
has one thread of its own, so that who sends the longest texts waits for the like and not others for
him. Tenants take turns at the threads by the seconds of CPU that they have had, which are told to
whoever pays for them. Work whose caller has left is dropped where it waits, and told so where it
runs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from router.keys.line import WaitingLine
from runtime.tiers import NO_TIER, Standing

INLINE_BYTES = 4 * 2**10
LONG_BYTES = 64 * 2**10
NUM_SHORT = 2

T = TypeVar("T")
Work = Callable[[Callable[[], bool]], T]
"""Its argument says whether the caller has left: the result then does not matter."""


def _nobody_leaves() -> bool:
    return False


class Payer(Protocol):
    """Who is asked for the seconds of CPU that a request takes of the router."""

    @property
    def standing(self) -> Standing:
        """Whose turn it takes."""

    def pay(self, cpu_s: float) -> None:
        """So many more seconds were used; on the event loop, maybe after the request has ended."""


class _Piece(Generic[T]):
    """One piece of work that waits for a thread, or is in one."""

    num_choices = 0  # what it costs is known when it has ended

    def __init__(self, work: Work[T], payer: Payer | None) -> None:
        self.payer = payer
        self.standing = NO_TIER if payer is None else payer.standing
        self.has_left = threading.Event()
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.work = work
        self.cpu_s: list[float] = []
        """What it took, once it has run."""


def _timed(work: Work[T], has_left: threading.Event, cpu_s: list[float]) -> T:
    """In a thread. It is told no piece: a failure knows its frames, and a piece its failure."""
    began = time.thread_time()
    try:
        return work(has_left.is_set)
    finally:
        cpu_s.append(time.thread_time() - began)


class _Lane:
    """Some threads, and who waits for them."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._line = WaitingLine[_Piece[Any]]()

    async def run(self, piece: _Piece[T]) -> T:
        self._line.add(piece)
        self._begin()
        try:
            return await piece.result
        finally:
            piece.has_left.set()
            self._line.remove(piece)
            # Its failure knows this frame: together they would keep the text until it is collected.
            del piece

    def close(self) -> None:
        for piece in list(self._line):
            self._line.remove(piece)
            piece.result.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        while self._num_free and (piece := self._line.pop()) is not None:
            if piece.result.done():
                continue  # its caller has left in this turn of the loop
            self._num_free -= 1
            running = loop.run_in_executor(
                self._executor, _timed, piece.work, piece.has_left, piece.cpu_s
            )
            running.add_done_callback(partial(self._ended, piece))

    def _ended(self, piece: _Piece[T], running: asyncio.Future[T]) -> None:
        self._num_free += 1
        cpu_s = sum(piece.cpu_s)
        self._line.charge(piece.standing.tenant, cpu_s)
        if piece.payer is not None:
            piece.payer.pay(cpu_s)
        if running.cancelled():
            piece.result.cancel()
            return
        error = running.exception()
        if not piece.result.done():
            if error is None:
                piece.result.set_result(running.result())
            else:
                piece.result.set_exception(error)
        self._begin()


class Lanes:
    """The threads of one process. One event loop owns them."""

    def __init__(self) -> None:
        self._short = _Lane(NUM_SHORT, "text")
        self._long = _Lane(1, "long-text")
        self._num_pending = 0

    @property
    def num_pending(self) -> int:
        """Pieces of work that wait or run in threads and are waited for."""
        return self._num_pending

    async def run(self, num_bytes: int, work: Work[T], payer: Payer | None = None) -> T:
        """The result of ``work``, whose cost grows with ``num_bytes`` and is ``payer``'s.

        None: nobody is asked who he is, and all have one turn after another.
        """
        if num_bytes <= INLINE_BYTES:
            if payer is None:
                return work(_nobody_leaves)
            began = time.thread_time()
            try:
                return work(_nobody_leaves)
            finally:
                payer.pay(time.thread_time() - began)
        lane = self._short if num_bytes <= LONG_BYTES else self._long
        self._num_pending += 1
        try:
            return await lane.run(_Piece(work, payer))
        finally:
            self._num_pending -= 1

    def close(self) -> None:
        """Take nothing more; what waits is dropped."""
        self._short.close()
        self._long.close()
