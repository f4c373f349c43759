"""Wakes all who wait for something to happen, each time it does. One event loop owns it."""

from __future__ import annotations

import asyncio
import contextlib


class Notifications:
    """Who begins to wait after a ``notify`` waits for the next one."""

    def __init__(self) -> None:
        self._told = asyncio.Event()

    def notify(self) -> None:
        """Wake all who wait now."""
        told, self._told = self._told, asyncio.Event()
        told.set()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next ``notify``, at the latest after ``timeout_s`` seconds."""
        told = self._told
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await told.wait()
