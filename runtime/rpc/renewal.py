"""What is made of files, made anew when they change: no process has to be restarted.

Whoever uses it asks, so nothing runs by itself: for the files of TLS whoever shakes hands, and
connections that stand go on as they are.
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
        *,
        what: str = "certificate",
    ) -> None:
        """``make`` raises ConfigError where the files cannot be used, here too.

        ``what`` they hold is said in the log.
        """
        self._what = what
        self._paths = paths
        self._make = make
        self._clock = clock
        self._seen = self._stamps()
        self._value = make()
        self._refused: list[tuple[int, ...]] = []
        self._check_at = clock() + CHECK_S

    @property
    def is_stale(self) -> bool:
        """Whether the files have changed since, and cannot be used."""
        return bool(self._refused)

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
            self._refused = []
            return self._value
        try:
            self._value = self._make()
        except ConfigError as error:
            if seen != self._refused:
                logger.warning("the former %s stays in use: %s", self._what, error)
            self._refused = seen
        else:
            self._seen, self._refused = seen, []
            logger.info("the %s of %s is in use from now on", self._what, self._paths[0])
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
