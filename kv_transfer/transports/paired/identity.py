"""Which process a peer is, and whether it is gone: needed only where it could write behind our
back.

A process id is compared with its start time, so that a later process with the same id is not taken
for it, and only inside one PID namespace, elsewhere it says nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from kv_transfer.transports.hello import WireError
from runtime.parsing import parse_json

_NUM_THREADS_FIELD, _START_TIME_FIELD = 19, 21  # of /proc/PID/stat, counted from 0
_NAME_FIELDS = 2  # the id and the name in parentheses, which may hold spaces


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process and the host that it runs on."""

    boot_id: str
    pid_namespace: str
    pid: int
    start_time: int
    """Clock ticks from the host's boot."""

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """Ours."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        start_time = _start_time(os.getpid())
        assert start_time is not None
        return cls(boot_id, namespace, os.getpid(), start_time)

    def encode(self) -> bytes:
        """For a WHO frame."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> ProcessIdentity:
        """What ``encode`` wrote.

        Raises:
            WireError: it is no identity.
        """
        try:
            values = parse_json(data)
            return cls(
                str(values["boot_id"]),
                str(values["pid_namespace"]),
                int(values["pid"]),
                int(values["start_time"]),
            )
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            raise WireError(f"not a process identity: {error!r}") from error

    def is_on_host_of(self, other: ProcessIdentity) -> bool:
        """Whether both run under one kernel."""
        return self.boot_id == other.boot_id

    def is_gone(self, observer: ProcessIdentity) -> bool:
        """Whether the process has certainly ended, as seen by ``observer`` (of this process)."""
        if not self.is_on_host_of(observer) or self.pid_namespace != observer.pid_namespace:
            return False
        return _start_time(self.pid) != self.start_time


def _start_time(pid: int) -> int | None:
    """None where there is no such process, or only the exit status of its last thread is left."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X") and int(fields[_NUM_THREADS_FIELD - _NAME_FIELDS]) <= 1:
        return None
    return int(fields[_START_TIME_FIELD - _NAME_FIELDS])
