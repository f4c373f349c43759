"""Work for one thread, from any other: done in order, between whatever else that thread does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from runtime.errors import InternalError, TandemError
from runtime.logging import get_logger

logger = get_logger(__name__)

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Command:
    """To be run once; what it raises ends the thread's work."""

    run: Callable[[], None]
    is_awaited: bool


class CommandQueue:
    """`submit` and `post` are for any thread, the rest for the one that works."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._over: TandemError | None = None
        self._lock = threading.Lock()  # orders submit against the end

    def submit(self, work: Callable[[], ResultT]) -> Future[ResultT]:
        """Have `work` run.

        A TandemError that it raises is the future's. So is any other exception, which also ends
        the thread's work, as a broken invariant does. After the end the future fails at once.
        """
        future: Future[ResultT] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, TandemError) or isinstance(error, InternalError):
                    raise

        with self._lock:
            if self._over is not None:
                future.set_exception(self._over)
            else:
                self._commands.put(Command(run, is_awaited=True))
        return future

    def post(self, work: Callable[[], None]) -> None:
        """The same for work that nobody waits for: all that it raises ends the thread's work.

        After the end nothing runs it.
        """
        self._commands.put(Command(work, is_awaited=False))

    def next(self, timeout_s: float = 0.0) -> Command | None:
        """The next command, waiting for one at most so long."""
        try:
            return self._commands.get(block=timeout_s > 0, timeout=timeout_s or None)
        except queue.Empty:
            return None

    def close(self, refusal: TandemError) -> None:
        """Refuse from now on; what was submitted before has a future that somebody waits for."""
        with self._lock:
            self._over = refusal
        while (command := self.next()) is not None:
            try:
                if command.is_awaited:
                    command.run()
            except Exception:
                logger.exception("a command failed after the end")
