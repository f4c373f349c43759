"""What is made of the files of TLS, made anew when they change: no process has to be restarted.

Whoever shakes hands asks, so nothing runs by itself. Connections that stand go on as they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from runtime.errors import ConfigError
from runtime.logging import get_logger

logger = get_logger(__name__)

CHECK_S = 2.0
"""The files are looked at so often at most."""

T = TypeVar("T")


class Renewed(Generic[T]):
    """The latest that could be made of some files; from any thread."""

    def __init__(
        self,
        paths: Sequence[str],
        make: Callable[[], T],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``make`` raises ConfigError where the files cannot be used, here too."""
        self._paths = paths
        self._make = make
        self._clock = clock
        self._seen = self._stamps()
        self._value = make()
        self._check_at = clock() + CHECK_S

    def current(self) -> T:
        """Of the files as they are now, or were a moment ago.

        What cannot be used, as while the certificate is written before its key, is tried again.
        """
        now = self._clock()
        if now < self._check_at:
            return self._value
        self._check_at = now + CHECK_S
        seen = self._stamps()
        if seen == self._seen:
            return self._value
        try:
            self._value = self._make()
        except ConfigError as error:
            logger.warning("the former certificate stays in use: %s", error)
        else:
            self._seen = seen
            logger.info("new connections are shown the certificate of %s", self._paths[0])
        return self._value

    def _stamps(self) -> list[tuple[int, ...]]:
        """What differs where a file was written, or another one put in its place."""
        stamps: list[tuple[int, ...]] = []
        for path in self._paths:
            try:
                found = os.stat(path)
            except OSError:
                stamps.append(())
            else:
                stamps.append((found.st_ino, found.st_mtime_ns, found.st_size))
        return stamps
