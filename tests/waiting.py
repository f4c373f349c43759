"""Waits for what threads, processes and servers of a test do beside it."""

import asyncio
import time
from collections.abc import Callable, Iterator

TIMEOUT_S = 60.0


def wait_until(
    condition: Callable[[], object], what: str = "it", timeout_s: float = TIMEOUT_S
) -> None:
    """Wait until `condition` holds; AssertionError, which names `what`, when the time is over."""
    for pause_s in _pauses(what, timeout_s):
        if condition():
            return
        time.sleep(pause_s)


async def until(
    condition: Callable[[], object], what: str = "it", timeout_s: float = TIMEOUT_S
) -> None:
    """`wait_until` in an event loop."""
    for pause_s in _pauses(what, timeout_s):
        if condition():
            return
        await asyncio.sleep(pause_s)


def _pauses(what: str, timeout_s: float) -> Iterator[float]:
    """Seconds between two looks, a 20th of what has passed: what is slow is seldom asked."""
    began = time.monotonic()
    while (passed_s := time.monotonic() - began) < timeout_s:
        yield min(max(passed_s / 20, 0.002), 0.05)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")
