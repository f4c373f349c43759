"""What happened to a cluster and who asked for it: a ring in memory, JSON lines on disk.

The file outlives the run, so that `tandem events` can tell what became of a cluster that is gone;
whoever opens it keeps its newest lines. One event loop owns an ``EventLog``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

from runtime.logging import fields, get_logger

logger = get_logger(__name__)

MOST_EVENTS = 4096
"""In memory, and in the file when it is opened."""


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
    """Who asked for it, as user@host; empty: the cluster itself."""
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
        self._num_seen = 0
        self._changed = asyncio.Event()
        if path is not None:
            self._adopt(path)

    def add(self, kind: EventKind, text: str, *, who: str = "", instance: str = "") -> None:
        """Note that something happened just now."""
        event = Event(time=time.time(), kind=kind, who=who, instance=instance, text=text)
        self._ring.append(event)
        self._num_seen += 1
        self._changed.set()
        self._changed = asyncio.Event()
        if self._path is not None:
            self._write(self._path, event)

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

    def _adopt(self, path: Path) -> None:
        former = read_events(path)
        self._ring.extend(former)
        self._num_seen = len(self._ring)
        with contextlib.suppress(OSError):
            lines = "".join(f"{event.to_json()}\n" for event in self._ring)
            temporary = path.with_name(f".{path.name}")
            temporary.write_text(lines, encoding="utf-8")
            temporary.replace(path)

    def _write(self, path: Path, event: Event) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(event.to_json() + "\n")
        except OSError as error:
            # A full disk must not stop the cluster; the ring still knows.
            logger.warning("cannot write %s", fields(path=path, error=error))


def read_events(path: Path, most: int = MOST_EVENTS) -> list[Event]:
    """The newest events in a file, oldest first; a line that is none is passed over."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    events = []
    for line in lines[-most:] if most else lines:
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
