"""All who wait are woken together, and nobody by what was told before."""

from __future__ import annotations

import asyncio

from runtime.notifications import Notifications


async def test_all_who_wait_are_woken_and_nobody_by_what_was_before() -> None:
    changed = Notifications()
    changed.notify()
    waiters = [asyncio.create_task(changed.wait(60.0)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(waiter.done() for waiter in waiters)
    changed.notify()
    late = asyncio.create_task(changed.wait(60.0))
    await asyncio.gather(*waiters)
    assert not late.done()
    changed.notify()
    await late


async def test_a_wait_without_news_ends() -> None:
    await Notifications().wait(0.01)
