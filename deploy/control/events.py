"""What happened to a cluster and who asked for it: a ring in memory, JSON lines on disk.

The file outlives the run, so that `tandem events` can tell what became of a cluster that is gone.
It only grows: each line is appended by itself, to whatever has the name at that moment, so that who
runs the cluster can put it away by renaming it. One event loop owns an ``EventLog``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import getpass
import json
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

from runtime.logging import fields, get_logger

logger = get_logger(__name__)

MOST_EVENTS = 4096
"""In memory, and read of the file when it is opened."""
_TAIL_BYTES = 4 * 2**20
"""Read of the end of a file, however long it is: more than its newest events have."""


class EventKind(enum.StrEnum):
    """What an event is about."""

    STARTED = "started"
    READY = "ready"
    STOPPING = "stopping"
    SCALE = "scale"
    DRAIN = "drain"
    RESTART = "restart"
    APPLY = "apply"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    KEYS = "keys"
    DEATH = "death"
    RESTARTED = "restarted"
    JOINED = "joined"
    DRAINING = "draining"
    LEFT = "left"


_OPERATIONS = frozenset({EventKind.SCALE, EventKind.DRAIN, EventKind.RESTART, EventKind.APPLY})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened."""

    time: float
    """Seconds since 1970."""
    kind: EventKind
    who: str = ""
    """Who asked for it, as user@host, by their own word; empty: the cluster itself."""
    source: str = ""
    """From where, as the connection had it."""
    instance: str = ""
    text: str = ""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Event:
        """The event of one line.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        values = json.loads(line)
        return cls(**{**values, "kind": EventKind(values["kind"])})


class EventLog:
    """Events of one cluster, the newest last."""

    def __init__(self, path: Path | None = None) -> None:
        """Go on after the events in ``path``; None: remember, and write nothing."""
        self._path = path
        self._ring: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._unwritten: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._num_seen = 0
        self._changed = asyncio.Event()
        if path is not None:
            self._ring.extend(read_events(path))
            self._num_seen = len(self._ring)

    def add(
        self, kind: EventKind, text: str, *, who: str = "", source: str = "", instance: str = ""
    ) -> str:
        """Note that something happened just now; why it could not be written, empty: it was."""
        event = Event(
            time=time.time(), kind=kind, who=who, source=source, instance=instance, text=text
        )
        self._ring.append(event)
        self._num_seen += 1
        self._changed.set()
        self._changed = asyncio.Event()
        if self._path is None:
            return ""
        self._unwritten.append(event)
        try:
            while self._unwritten:
                append_event(self._path, self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            # A full disk must not stop the cluster; what is missing is written with the next one.
            logger.error("an event is not on record %s", fields(path=self._path, error=error))
            return f"{self._path}: {error.strerror or error}"
        return ""

    def newest(self, most: int = 0) -> list[Event]:
        """The newest ``most`` events, oldest first; 0: all that are remembered."""
        return list(self._ring)[-most:]

    async def follow(self, most: int = 0) -> AsyncIterator[Event]:
        """``newest``, then every event as it comes, for ever.

        Whoever is slower than the ring is long misses what left it.
        """
        seen = self._num_seen - len(self.newest(most))
        while True:
            changed = self._changed
            missing = min(self._num_seen - seen, len(self._ring))
            seen = self._num_seen
            for event in self.newest(missing) if missing else ():
                yield event
            if seen == self._num_seen:
                await changed.wait()


def who() -> str:
    """Who runs this command, for the record of events."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, in a container
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def append_event(path: Path, event: Event) -> None:
    """Write one line at the end of a file that only grows; of its user alone, where it is new.

    Raises:
        OSError: it is not there, or not whole.
    """
    line = f"{event.to_json()}\n".encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # the line before was torn by a full disk
        if os.write(descriptor, line) != len(line):
            raise OSError("the disk took only a part of a line")
    finally:
        os.close(descriptor)


def read_events(path: Path) -> list[Event]:
    """The newest events in a file, oldest first; a line that is none is passed over."""
    try:
        with path.open("rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(begin)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    events = []
    for line in lines[-MOST_EVENTS:]:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            events.append(Event.from_json(line))
    return events


def interrupted(events: Iterable[Event]) -> list[Event]:
    """The operations among ``events`` that began and did not end, oldest first."""
    begun: dict[tuple[str, str], Event] = {}
    for event in events:
        if event.kind in _OPERATIONS:
            begun[event.who, event.text] = event
        elif event.kind in (EventKind.DONE, EventKind.FAILED):
            for who, text in list(begun):
                if event.who == who and event.text.startswith(f"{text}: "):
                    del begun[who, text]
    return list(begun.values())
