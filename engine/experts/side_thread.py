"""Work beside the steps: one thread, one piece after another, that nobody waits for.

The pieces of all ranks are handed in in the same order, so they may call collectives of a group of
their own. The thread ends with the process, whatever it waits for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from engine.parallel.groups import RankGroup
from runtime.errors import InternalError, TandemError

T = TypeVar("T")


class SideThread:
    """See the module. `submit` is for one thread, `close` too."""

    def __init__(self, name: str) -> None:
        """Start it."""
        self._pieces: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Return what will be done when `work` is, with a TandemError where it fails."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                result = work()
            except TandemError as error:
                done.set_exception(error)
            except Exception as error:
                done.set_exception(InternalError(f"{type(error).__name__}: {error}"))
            else:
                done.set_result(result)

        self._pieces.put(run)
        return done

    def close(self, timeout_s: float = 1.0) -> None:
        """Take nothing more, and wait so long for what is under way."""
        self._pieces.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            piece()


def gather_bytes(group: RankGroup, payload: bytes) -> list[bytes]:
    """Return what every rank brings, in rank order; all ranks call.

    Raises:
        PeerLostError: a rank died, or did not come in time.
    """
    sizes = group.all_gather(torch.tensor([len(payload)], dtype=torch.int64)).tolist()
    row = torch.zeros(1, max(*sizes, 1), dtype=torch.uint8)
    row[0, : len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[
        : len(payload)
    ]
    rows = group.all_gather(row)
    return [bytes(rows[i, :size].numpy().tobytes()) for i, size in enumerate(sizes)]
