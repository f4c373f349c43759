"""What an attempt watches is looked at, however the watching ends."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

import pytest

from router.pool.members import Role
from router.requests.attempt import Attempt
from router.requests.generation import Generation, Mailbox
from runtime.budget import Budget, BudgetKind
from runtime.errors import DeadlineExceededError
from runtime.sampling import SamplingParams


def generation_of() -> Generation:
    return Generation(
        request_id="r",
        index=0,
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=1),
        cache_salt="",
        mailbox=Mailbox(),
        received=0.0,
    )


async def test_a_call_that_fails_as_its_client_leaves_is_not_lost() -> None:
    """Both deadlines are the same: decode's answer and the cancel may meet."""
    loop = asyncio.get_running_loop()
    unseen: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    budget = Budget.start(BudgetKind.REQUEST, 1.0, loop.time())
    generation = generation_of()
    nothing = cast(Any, None)
    attempt = Attempt(nothing, generation, nothing, number=0, budget=budget, seek_room=nothing)
    answered: asyncio.Future[None] = loop.create_future()

    async def answer() -> None:
        await answered
        raise DeadlineExceededError("the request's time is over")

    call = asyncio.create_task(answer())
    watching = asyncio.create_task(attempt._watch(call, Role.DECODE))
    del call
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
