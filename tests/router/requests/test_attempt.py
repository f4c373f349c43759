"""What an attempt watches is looked at, however the watching ends."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.pool.members import WorkerKey
from router.requests.attempt import Attempt
from runtime.errors import DeadlineExceededError


async def test_a_call_that_fails_as_its_client_leaves_is_not_lost() -> None:
    """Both deadlines are the same: decode's answer and the cancel may meet."""
    loop = asyncio.get_running_loop()
    unseen: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    generation = SimpleNamespace(request_id="r")
    attempt = Attempt(
        cast(Any, None), cast(Any, generation), cast(Any, None), number=0, deadline=loop.time()
    )
    answered: asyncio.Future[None] = loop.create_future()

    async def answer() -> None:
        await answered
        raise DeadlineExceededError("the request's time is over")

    key = WorkerKey(instance="decode-0", epoch=1, rank=0)
    watching = asyncio.create_task(
        attempt._watch(answer(), lambda: pytest.fail("the call is over"), "decode", key)
    )
    await asyncio.sleep(0)
    answered.set_result(None)
    # One turn for the answer to fail; its watcher would be woken in the next, with the cancel.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    watching.cancel()
    with pytest.raises((asyncio.CancelledError, DeadlineExceededError)):
        await watching
    del watching
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []
