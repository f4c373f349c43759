"""Work on a thread that nobody has to wait for: slow, and perhaps never over.

A boot waits for weights, compilers and other ranks; a process that is told to stop meanwhile must
not wait with it. The threads of `asyncio.to_thread` are waited for when the event loop is closed.
This one ends with the process, which has to end without destructors then: they may run while the
thread still works (see `worker.run.RankService.is_stuck`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_on_daemon(work: Callable[[], T], *, name: str) -> T:
    """Return what `work` returns, or raise what it raises; cancelling leaves it to itself.

    Args:
        work: runs on a thread of its own.
        name: of that thread.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            loop.call_soon_threadsafe(lambda: None if outcome.done() else settle())

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            failure = error
            tell(lambda: outcome.set_exception(failure))
        else:
            tell(lambda: outcome.set_result(result))

    threading.Thread(target=run, name=name, daemon=True).start()
    return await outcome
