"""Python's garbage collector, kept from looking through what a process has for good.

A full collection looks at every object, some hundred thousand of which are modules, and nothing
else runs meanwhile: no stream gets a token, and every rank of a group waits for the one that looks.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from runtime.logging import fields, get_logger

LONG_PAUSE_S = 0.01
"""Beyond it a collection is told of: a step of decode takes some 25 ms."""

logger = get_logger(__name__)


def set_aside(*, young_objects: int | None = None) -> None:
    """Collect once, and do not look through what is left until `take_back`.

    Nothing of it that comes to be in a cycle is freed until then, so it is for the end of a boot. A
    process that ends need not take it back: its end then takes a second less.

    Args:
        young_objects: so many new ones, and the collector looks for cycles among them; None: as
            many as before.
    """
    began = time.perf_counter()
    if young_objects is not None:
        gc.set_threshold(young_objects)
    gc.collect()
    pause_ms = 1e3 * (time.perf_counter() - began)
    gc.freeze()
    facts = fields(objects=gc.get_freeze_count(), milliseconds=round(pause_ms))
    logger.info("set aside from the garbage collector %s", facts)


def take_back() -> None:
    """Have the next full collection look through everything again."""
    gc.unfreeze()


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that was dealt with, and of all that it came from.

    A traceback holds the frames that it passed, and they all that they had. Where one of them holds
    the error too, as a variable or by a future, only a collection would free them.
    """
    left: list[BaseException] = [error]
    while left:
        one = left.pop()
        if one.__traceback__ is not None:
            one.__traceback__ = None
            left += [each for each in (one.__cause__, one.__context__) if each is not None]


class CollectorPauses:
    """Counts the collections in which this process stood still for long; for any thread.

    Attributes:
        num_long: of them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Count nothing before `watched`; `clock` is in seconds."""
        self._clock = clock
        self._began_s = self._longest_s = 0.0
        self._num_told = self.num_long = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count what comes."""
        gc.callbacks.append(self._note)
        try:
            yield
        finally:
            gc.callbacks.remove(self._note)

    def tell(self) -> None:
        """Log what came since the last call."""
        count = self.num_long - self._num_told
        if count:
            facts = fields(count=count, longest_ms=round(1e3 * self._longest_s))
            logger.warning("stood still to collect garbage %s", facts)
            self._num_told, self._longest_s = self.num_long, 0.0

    def _note(self, phase: str, info: Mapping[str, int]) -> None:
        # Wherever an object is made, perhaps under a lock of the log's or of a metric's: so these
        # are told later. No collection begins within another.
        if phase == "start":
            self._began_s = self._clock()
            return
        pause_s = self._clock() - self._began_s
        if pause_s > LONG_PAUSE_S:
            self.num_long += 1
            self._longest_s = max(self._longest_s, pause_s)
