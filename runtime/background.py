"""Tasks that nobody awaits: kept from the garbage collector, and their failures told.

asyncio holds a task by a weak reference and tells of its exception only when it is collected, if
ever. Whoever starts work that outlives the call starts it here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, copy_context
from typing import Any

from runtime.logging import fields, get_logger
from runtime.trace.context import without_trace

logger = get_logger(__name__)


def tell_failure(task: asyncio.Task[Any]) -> None:
    """Log what ended ``task``, should anything: a callback for one that is done."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a task failed %s", fields(task=task.get_name()), exc_info=error)


class BackgroundTasks:
    """The tasks of one owner. One event loop owns it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Those that have not ended."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run ``work``; an exception of it is logged with ``name``.

        It has no trace, as it may go on for others than the request that starts it.
        """
        return self._start(work, name, without_trace())

    def start_for_request(
        self, work: Coroutine[Any, Any, None], *, name: str
    ) -> asyncio.Task[None]:
        """The same, for work that is of the request whose trace is set."""
        return self._start(work, name, copy_context())

    def _start(
        self, work: Coroutine[Any, Any, None], name: str, context: Context
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(tell_failure)
        return task

    async def settle(self) -> None:
        """Return when all have ended, those included that are started meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)
            await asyncio.sleep(0)  # for their callbacks

    async def close(self) -> None:
        """Cancel all, and return when they have ended."""
        for task in self._tasks:
            task.cancel()
        await self.settle()
