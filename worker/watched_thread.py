"""A daemon thread that works on a device, and how it ended.

A call that never returns holds the thread for ever. So calls are limited by a `Watchdog`, which
ends the work in the thread's stead; nobody has to wait for the thread, and no destructor may.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager

from worker.watchdog import AbandonedError, Watchdog, WatchdogOptions


class WatchedThread:
    """`start` may be called once; `watch` is for the thread itself, the rest for any."""

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        end: Callable[[BaseException | None], BaseException | None],
        options: WatchdogOptions | None = None,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            name: of the thread.
            work: all that it does.
            end: called once, with what ended the work; returns what `ended` is to say. On the
                thread, or on the watchdog's, which then owns what the thread owned.
            options: of the watchdog.
        """
        self._work, self._end_work = work, end
        self._watchdog = Watchdog(self._end, options)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.ended: Future[BaseException | None] = Future()
        """Done when the work is over, with why; None for an orderly end."""

    @property
    def is_overdue(self) -> bool:
        """Whether the thread hangs in a call that was given up."""
        return self._watchdog.is_overdue

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs, and its calls return in time."""
        return self._thread.is_alive() and not self.is_overdue

    def start(self) -> None:
        """Start to work."""
        self._watchdog.start()
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread's end; whether it has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def watch(self, what: str, limit_s: float) -> AbstractContextManager[None]:
        """Limit the time of a call that may never return; see `Watchdog.watch`."""
        return self._watchdog.watch(what, limit_s)

    def unwatched(self) -> AbstractContextManager[None]:
        """Watch nothing inside of a `watch`; see `Watchdog.unwatched`."""
        return self._watchdog.unwatched()

    def _run(self) -> None:
        caught: BaseException | None = None
        try:
            self._work()
        except AbandonedError:
            return  # the watchdog has ended the work
        except BaseException as error:
            caught = error
        self._watchdog.close()
        self._end(caught)

    def _end(self, caught: BaseException | None) -> None:
        self.ended.set_result(self._end_work(caught))
