"""Notices that a thread hangs in a call that should long have returned, and ends the process.

A GPU's kernels that wait for a rank that is gone, or a driver that never answers, hold the calling
thread for ever; nothing can be raised in it. So a second thread looks at the clock. The key idea:
what the watched thread owns belongs to the watchdog from the moment it declares the call overdue.
Should the call return after all, the thread is told by `AbandonedError` and must touch nothing.

What remains of the process is asked to end in order; since whatever it closes may wait for the same
device, it is ended by force after a grace period.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from runtime.errors import DeviceError
from runtime.logging import fields, get_logger

logger = get_logger(__name__)

ABORTED_STATUS = 70
"""Exit status of a process that was ended by force."""


class AbandonedError(BaseException):
    """The call that returns here was declared overdue; its thread ends and touches nothing."""


class StepOverdueError(DeviceError):
    """A step, or the meeting before it, did not end in its time."""


def abort_process() -> None:
    """End the process at once: no destructor, no thread, no library is waited for."""
    logging.shutdown()
    os._exit(ABORTED_STATUS)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogOptions:
    """Times, in seconds, and what force is.

    Attributes:
        poll_s: how often the clock is looked at.
        grace_s: from the moment that a call is declared overdue to `abort`; longer than it takes to
            answer everybody and to close what can be closed.
        abort: ends the process.
    """

    poll_s: float = 0.5
    grace_s: float = 15.0
    abort: Callable[[], None] = abort_process


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    what: str
    limit_s: float
    since: float


class Watchdog:
    """Watches the calls of one thread; `watch` is for that thread, `close` for any."""

    def __init__(
        self,
        on_overdue: Callable[[StepOverdueError], None],
        options: WatchdogOptions | None = None,
    ) -> None:
        """Nothing is watched before `start`.

        Args:
            on_overdue: called once, on the watchdog's thread, which owns from then on what the
                watched thread owned; answers whoever waits and asks the process to end.
            options: see `WatchdogOptions`.
        """
        self._on_overdue = on_overdue
        self._options = options or WatchdogOptions()
        self._lock = threading.Lock()
        self._call: _Call | None = None
        self._is_overdue = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    @property
    def is_overdue(self) -> bool:
        """Whether a call was declared overdue: its thread may never end."""
        return self._is_overdue

    def start(self) -> None:
        """Start to look at the clock."""
        self._thread.start()

    def close(self) -> None:
        """Watch no more. Has no effect on a process whose end by force is due."""
        if not self._is_overdue:
            self._closed.set()

    @contextlib.contextmanager
    def watch(self, what: str, limit_s: float) -> Iterator[None]:
        """Limit the time of what runs in this context; calls do not nest but in `unwatched`.

        Args:
            what: names the call in the error.
            limit_s: seconds; 0 for no limit.

        Raises:
            AbandonedError: on leaving, the call was declared overdue.
        """
        if not limit_s:
            yield
            return
        self._call = _Call(what=what, limit_s=limit_s, since=time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                self._call = None
                if self._is_overdue:
                    raise AbandonedError

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Stop watching inside of a `watch`: the thread may change what it owns, and watch others.

        The time of this context does not count.

        Raises:
            AbandonedError: on entering, the call was declared overdue.
        """
        with self._lock:
            if self._is_overdue:
                raise AbandonedError
            call, self._call = self._call, None
        paused_at = time.monotonic()
        try:
            yield
        finally:
            if call is not None:
                call = replace(call, since=call.since + time.monotonic() - paused_at)
            self._call = call

    def _run(self) -> None:
        while not self._closed.wait(self._options.poll_s):
            error = self._declare()
            if error is not None:
                self._end(error)
                return

    def _declare(self) -> StepOverdueError | None:
        """Take over from the watched thread if its time is over."""
        with self._lock:
            call = self._call
            if call is None or time.monotonic() - call.since < call.limit_s:
                return None
            self._is_overdue = True
        return StepOverdueError(
            f"{call.what} did not end within {call.limit_s:g} s: the device hangs, or waits for a "
            "rank that is gone"
        )

    def _end(self, error: StepOverdueError) -> None:
        logger.critical("giving up %s", fields(error=error, grace_s=self._options.grace_s))
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback(sys.__stderr__)
        try:
            self._on_overdue(error)
        except Exception:
            logger.exception("the end could not be told")
        time.sleep(self._options.grace_s)
        logger.critical("the process does not end by itself")
        self._options.abort()
