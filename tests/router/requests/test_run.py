"""How the choices of one HTTP request end together."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from router.requests.generation import Generation, Mailbox
from router.requests.pipeline import Pipeline
from router.requests.run import RequestRun
from runtime.sampling import SamplingParams


class SlowToEnd:
    """A pipeline whose runs need the loop once more after they were cancelled."""

    def __init__(self) -> None:
        self.num_ended = 0

    async def run(self, generation: Generation) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.num_ended += 1


def run_of(pipeline: SlowToEnd) -> RequestRun:
    mailbox = Mailbox()
    generations = [
        Generation(
            request_id=f"r.{index}",
            index=index,
            prompt_token_ids=[1],
            sampling=SamplingParams(max_tokens=1),
            cache_salt="",
            mailbox=mailbox,
            received=0.0,
        )
        for index in range(2)
    ]
    return RequestRun(cast(Pipeline, pipeline), mailbox, generations)


async def fail_within(run: RequestRun) -> None:
    async with run:
        await asyncio.sleep(0)
        raise ConnectionResetError


async def test_a_whole_answer_waits_for_nothing_more() -> None:
    # While it waited, its client could leave, and the answer would count as not delivered.
    pipeline = SlowToEnd()
    async with run_of(pipeline):
        await asyncio.sleep(0)
    assert pipeline.num_ended == 0
    await asyncio.sleep(0.05)
    assert pipeline.num_ended == 2


async def test_a_failed_answer_leaves_nothing_behind() -> None:
    pipeline = SlowToEnd()
    with pytest.raises(ConnectionResetError):
        await fail_within(run_of(pipeline))
    assert pipeline.num_ended == 2
