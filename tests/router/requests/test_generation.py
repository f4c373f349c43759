"""Tokens come to their client in order, whichever of two ways each of them takes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.requests.generation import Generation, Mailbox
from runtime.sampling import SamplingParams

STEPS = st.lists(st.sampled_from(["token", "pair", "tokens", "take", "open", "shut"]), max_size=40)


class FakeFlow:
    """Takes what it can while it is open."""

    def __init__(self, told: list[int]) -> None:
        self.told = told
        self.is_open = False

    def take(self, token_id: int, now: float) -> bool:
        return self.take_all([token_id], now)

    def take_all(self, token_ids: Sequence[int], now: float) -> bool:
        assert now == float(token_ids[0])
        if self.is_open:
            self.told += token_ids
        return self.is_open


@given(STEPS)
def test_no_token_overtakes_another(steps: list[str]) -> None:
    async def run() -> tuple[list[int], list[int]]:
        mailbox = Mailbox()
        generation = Generation(
            request_id="r",
            index=0,
            prompt_token_ids=[1],
            sampling=SamplingParams(max_tokens=1000),
            cache_salt="",
            mailbox=mailbox,
            received=0.0,
        )
        told: list[int] = []
        flow = FakeFlow(told)

        def take() -> None:
            told.extend(i for output in mailbox.take_now() for i in output.token_ids)

        generation.flow = flow
        for step in steps:
            index = generation.num_tokens
            if step == "token":
                generation.hand_over_token(index, float(index))
                assert generation.timings.last_token == float(index)
            elif step == "pair":
                generation.hand_over_tokens([index, index + 1], float(index), 1)
            elif step == "tokens":
                generation.hand_over([index, index + 1], [], None)
            elif step == "take":
                take()
            else:
                flow.is_open = step == "open"
        take()
        return told, generation.output_token_ids

    told, handed_over = asyncio.run(run())
    assert told == handed_over == list(range(len(told)))
