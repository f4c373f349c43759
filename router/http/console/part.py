"""What one HTTP process alone knows, and how several processes on one port put it together.

They share a folder already, in which their metrics add up. Whoever has viewers marks there that
the others' parts are wanted; each of them writes its own once a second while the mark is fresh, and
looks at the mark, one system call a second, while it is not.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from router.http.console.finished import Finished

FRESH_S = 5.0
"""A mark or a part that is older is of nobody any more."""
MARK = "console.wanted"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """One choice that is under way. Its text is not here."""

    request_id: str
    model: str
    key_name: str
    """Of its API key; "" where none is asked for."""
    phase: str
    age_s: float
    prefill: str
    decode: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_migrations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Of the pool, as it is told."""

    at: float
    kind: str
    role: str
    instance: str
    ranks: Sequence[int]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Of one process's history."""

    number: int
    """Wall clock, in steps of history."""
    num_in_flight: int
    num_waiting: int
    num_answers: int
    """Since the point before, as errors and finished requests are."""
    num_errors: int
    """That are ours; those of callers' own mistakes are not among them."""
    num_finished: int
    median_ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Of one HTTP process."""

    pid: int
    uptime_s: float
    num_in_flight: int
    num_waiting: int
    max_in_flight: int
    oldest_wait_s: float
    num_connections: int
    loop_lag_s: float
    num_live: int
    live: Sequence[LiveRequest]
    """The oldest of them."""
    finished: Sequence[Finished]
    errors: dict[str, int]
    """By code, since the process began."""
    recent_errors: dict[str, int]
    """Of the last five minutes."""
    events: Sequence[Event] = ()
    history: Sequence[Point] = field(default_factory=tuple)


def part_from_json(raw: bytes) -> Part:
    """The inverse of ``orjson.dumps``."""
    fields = orjson.loads(raw)
    nested = {
        "live": [LiveRequest(**item) for item in fields["live"]],
        "finished": [Finished(**item) for item in fields["finished"]],
        "events": [Event(**item) for item in fields["events"]],
        "history": [Point(**item) for item in fields["history"]],
    }
    return Part(**{**fields, **nested})


class PartFolder:
    """The folder that HTTP processes of one router share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mine = folder / f"console-{os.getpid()}.json"

    def want(self) -> None:
        """Ask the others for their parts."""
        (self._folder / MARK).touch()

    def is_wanted(self) -> bool:
        """Whether somebody asked a moment ago."""
        return _is_fresh(self._folder / MARK)

    def write(self, part: Part) -> None:
        """Show our part, whole or not at all."""
        temporary = self._mine.with_suffix(".new")
        temporary.write_bytes(orjson.dumps(part))
        temporary.replace(self._mine)

    def others(self) -> list[Part]:
        """The parts of the processes that live."""
        parts = []
        for path in sorted(self._folder.glob("console-*.json")):
            if path != self._mine and _is_fresh(path):
                with contextlib.suppress(OSError):  # its process has ended meanwhile
                    parts.append(part_from_json(path.read_bytes()))
        return parts


def _is_fresh(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < FRESH_S
    except OSError:
        return False
