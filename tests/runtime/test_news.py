"""All who wait are woken together, and nobody by what was told before."""

from __future__ import annotations

import asyncio

from runtime.news import News


async def test_all_who_wait_are_woken_and_nobody_by_what_was_before() -> None:
    news = News()
    news.tell()
    waiters = [asyncio.create_task(news.wait(60.0)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(waiter.done() for waiter in waiters)
    news.tell()
    late = asyncio.create_task(news.wait(60.0))
    await asyncio.gather(*waiters)
    assert not late.done()
    news.tell()
    await late


async def test_a_wait_without_news_ends() -> None:
    await News().wait(0.01)
