"""The runner's side of `tests.matrix.moments`: who stands at which moment."""

from __future__ import annotations

import json
import queue
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.matrix.moments import SOCKET


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A process that stands at a moment."""

    pid: int
    connection: socket.socket

    def release(self, word: bytes = b"go") -> None:
        """Have it go on, if it still can."""
        with self.connection:
            try:
                self.connection.sendall(word)
            except OSError:
                return


class Stage:
    """One moment at a time; use it as a context manager. Any process may come by."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wanted = ""
        self._came: queue.Queue[Standing] = queue.Queue()
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve, name="stage")

    def __enter__(self) -> Stage:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.disarm()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def arm(self, moment: str, after: int = 1) -> None:
        """Who comes to the moment for the `after`-th time stands still, the first to do so."""
        with self._lock:
            self._wanted = moment
        (self._folder / moment).write_text(str(after))

    def disarm(self) -> None:
        """Nobody stands any more."""
        with self._lock:
            self._take()
        while not self._came.empty():
            self._came.get().release()

    def wait(self, timeout_s: float) -> Standing | None:
        """Who stands; None if nobody came in time."""
        try:
            return self._came.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _take(self) -> None:
        if self._wanted:
            (self._folder / self._wanted).unlink(missing_ok=True)
        self._wanted = ""

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                told = json.loads(connection.recv(4096))
            except (OSError, ValueError):
                connection.close()
                continue
            standing = Standing(pid=told["pid"], connection=connection)
            with self._lock:
                is_wanted = told["moment"] == self._wanted
                if is_wanted:
                    self._take()
            if is_wanted:
                self._came.put(standing)
            else:
                standing.release()
