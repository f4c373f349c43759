"""Waiting for the first of several things."""

from __future__ import annotations

import asyncio
from typing import Any


async def first_done(*futures: asyncio.Future[Any]) -> None:
    """Return when one of ``futures`` is done; none is cancelled, and none asked for its result.

    As ``asyncio.wait`` with FIRST_COMPLETED, without the sets that it makes and returns.
    """
    for future in futures:
        if future.done():
            return
    waiter: asyncio.Future[None] = futures[0].get_loop().create_future()

    def wake(_: asyncio.Future[Any]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    for future in futures:
        future.add_done_callback(wake)
    try:
        await waiter
    finally:
        for future in futures:
            future.remove_done_callback(wake)
