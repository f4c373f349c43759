"""A process beside a rank in which its plans are computed.

A plan takes 0.03 to 0.3 s of a core, most of it in an interpreter: in a thread of the rank it would
hold up the engine loop, which waits for its own interpreter again and again in every step, for
5 ms each time. The process knows numpy and no device, and ends when the rank does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Final, ParamSpec, Protocol, TypeVar

from runtime.errors import InternalError

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_S: Final = 20.0
"""Of one computation; less than a turn of the ranks may last."""
_NICENESS: Final = 10
_END_S: Final = 5.0


class Compute(Protocol):
    """Calls a function somewhere, and returns what it does."""

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Raises InternalError where that is elsewhere, and fails."""
        ...


def compute_here(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it on this thread."""
    return function(*args, **kwargs)


class PlanProcess:
    """See the module. For one thread at a time; `close` when that asks for nothing any more."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """Start nothing before the first call; `timeout_s` is of each."""
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None where there is none."""
        return None if self._process is None else self._process.pid

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of a module there.

        Args:
            function: found by its name.
            args: to be pickled, as the result is.
            kwargs: the same.

        Raises:
            InternalError: it failed, took too long, or the process ended; the next call has another
                process then.
        """
        connection = self._connection or self._start()
        try:
            connection.send((function, args, kwargs))
            told = connection.recv() if connection.poll(self._timeout_s) else None
        except (OSError, EOFError) as error:
            self.close()
            raise InternalError(f"the process of plans ended: {error or 'it died'}") from error
        if told is None:
            self.close()
            raise InternalError(f"a plan took more than {self._timeout_s:g} s")
        problem, result = told
        if problem:
            raise InternalError(problem)
        returned: T = result
        return returned

    def close(self) -> None:
        """End it, whatever it does."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is not None:
            process.kill()
            process.wait(_END_S)
        if connection is not None:
            connection.close()  # behind its end, which a thread that waits hears of

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            paths = os.pathsep.join(filter(None, sys.path))
            one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **one_thread, "PYTHONPATH": paths},
            )
        self._connection = Connection(ours.detach())
        return self._connection


def main(arguments: Sequence[str]) -> int:
    """Compute what is asked for, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank's to answer
    os.nice(_NICENESS)
    connection = Connection(int(arguments[0]))
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            return 0
        try:
            told = "", function(*args, **kwargs)
        except Exception as error:
            told = f"{type(error).__name__}: {error}", None
        try:
            connection.send(told)
        except BrokenPipeError:
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
