"""Work on a thread that nobody waits for."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from worker.daemon import run_on_daemon


async def test_results_and_errors_come_back() -> None:
    def fail() -> None:
        raise ValueError("no weights")

    assert await run_on_daemon(lambda: threading.current_thread().name, name="boot") == "boot"
    with pytest.raises(ValueError, match="no weights"):
        await run_on_daemon(fail, name="boot")


def test_the_event_loop_ends_while_the_work_goes_on() -> None:
    release, over = threading.Event(), threading.Event()

    def work() -> None:
        release.wait(60)
        over.set()

    async def main() -> None:
        async with asyncio.timeout(0.05):
            await run_on_daemon(work, name="boot")

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert time.monotonic() - began < 30  # and not when the work is over
    assert not over.is_set()
    release.set()
    assert over.wait(60), "and nothing is raised into a loop that is gone"
