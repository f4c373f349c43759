"""An event loop whose time passes only while everybody waits for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: it counts the seconds that it was to wait for."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nobody for a time: the model is stuck")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module; its time begins at 0 s."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds that were waited for."""
        return self._jumping.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """The result of ``main``, as soon as it can be computed."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
