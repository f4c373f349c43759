"""How much memory a process may still take of its host, or of its container."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

CGROUP: Final = Path("/sys/fs/cgroup")


def free_bytes(cgroup: Path = CGROUP) -> int:
    """Return what is free, or would be by giving up caches: the less of host and container.

    Args:
        cgroup: the container's folder of control files, version 2; without a limit in it, or
            without it, only the host counts.
    """
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (
            (cgroup / name).read_text(encoding="ascii").strip()
            for name in ("memory.max", "memory.current")
        )
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))
