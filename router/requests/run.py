"""All choices of one HTTP request: started together, merged in one mailbox, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

from router.requests.generation import Generation, Mailbox
from router.requests.pipeline import Pipeline
from runtime.background import tell_failure

MAX_PARALLEL = 32
"""Choices of one HTTP request that are in the workers' hands at once; the others wait here."""


class RequestRun:
    """An async context: leaving it, in whatever way, releases everything in the workers."""

    def __init__(
        self,
        pipeline: Pipeline,
        mailbox: Mailbox,
        generations: Sequence[Generation],
        *,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """``generations`` share ``mailbox``.

        ``on_ended`` is called once no choice is in the workers' hands any more.
        """
        self._on_ended = on_ended
        self.mailbox = mailbox
        """New outputs of any of the choices."""
        self.generations = generations
        self._pipeline = pipeline
        self._gate = asyncio.Semaphore(MAX_PARALLEL) if len(generations) > MAX_PARALLEL else None
        self._tasks: list[asyncio.Task[None]] = []
        self._num_running = 0

    async def __aenter__(self) -> RequestRun:
        drive = self._pipeline.run if self._gate is None else self._drive
        self._tasks = [
            asyncio.create_task(drive(generation), name=generation.request_id)
            for generation in self.generations
        ]
        self._num_running = len(self._tasks)
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        # After a whole answer nothing is waited for: its client may leave now, and this handler
        # would be cancelled here, as if the answer had not arrived.
        if exc_type is not None:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop(self, index: int) -> None:
        """End one choice whose text is complete."""
        self._tasks[index].cancel()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        tell_failure(task)
        self._num_running -= 1
        if self._num_running == 0:
            self._on_ended()

    async def _drive(self, generation: Generation) -> None:
        assert self._gate is not None
        async with self._gate:
            await self._pipeline.run(generation)
