"""One timer, three limits; each one's end says what was waited for and which setting it is."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from router.requests.generation import Generation, Mailbox
from router.requests.time_limits import TimeLimits
from runtime.config import RouterSection
from runtime.errors import DeadlineExceededError
from runtime.sampling import SamplingParams
from tests.router.conftest import ANSWER, MODEL, StartRouter
from tests.waiting import until

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 100}
LONG_S = 60.0


def generation_of() -> Generation:
    return Generation(
        request_id="r",
        index=0,
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=1000),
        cache_salt="",
        mailbox=Mailbox(),
        received=asyncio.get_running_loop().time(),
    )


@pytest.mark.parametrize(
    ("setting", "num_tokens", "kind"),
    [
        ("request_timeout_s", 0, "the request"),
        ("request_timeout_s", 3, "the request"),
        ("first_token_timeout_s", 0, "the first token"),
        ("token_timeout_s", 3, "the next token"),
    ],
)
async def test_each_limit_names_itself(setting: str, num_tokens: int, kind: str) -> None:
    generation = generation_of()
    if num_tokens:
        generation.hand_over([5] * num_tokens, [], None)
    generation.phase = "tasting"
    limits = TimeLimits(generation, RouterSection(**{setting: 0.05}))  # type: ignore[arg-type]
    with pytest.raises(DeadlineExceededError) as caught:
        await limits.run(asyncio.sleep(LONG_S))
    expected = f"0.05 s for {kind} (router.{setting}) are over while tasting"
    assert caught.value.message == expected


async def test_tokens_keep_a_request_alive_with_one_timer() -> None:
    loop = asyncio.get_running_loop()
    generation = generation_of()
    section = RouterSection(first_token_timeout_s=2.0, token_timeout_s=2.0)
    armed = 0
    call_at = loop.call_at

    def counting(when: float, callback: object, *arguments: object, **more: object) -> object:
        nonlocal armed
        armed += getattr(callback, "__func__", None) is TimeLimits._ring
        return call_at(when, callback, *arguments, **more)  # type: ignore[arg-type]

    async def generate() -> None:
        for _ in range(100):  # for longer than each limit
            generation.hand_over([5], [], None)
            await asyncio.sleep(0.03)

    loop.call_at = counting  # type: ignore[method-assign, assignment]
    try:
        await TimeLimits(generation, section).run(generate())
    finally:
        loop.call_at = call_at  # type: ignore[method-assign]
    assert generation.num_tokens == 100
    assert 1 <= armed < 20


async def test_a_timeout_of_the_work_itself_is_no_limit_of_ours() -> None:
    async def work() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await TimeLimits(generation_of(), RouterSection()).run(work())


async def test_a_cancel_from_outside_stays_a_cancel() -> None:
    task = asyncio.create_task(
        TimeLimits(generation_of(), RouterSection()).run(asyncio.sleep(LONG_S))
    )
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_long_answer_passes_the_defaults() -> None:
    section = RouterSection()
    assert section.request_timeout_s - section.first_token_timeout_s > 32_000 * 0.1


@pytest.mark.parametrize(
    ("setting", "phase"),
    [
        ("first_token_timeout_s", "waiting for prefill"),
        ("token_timeout_s", "decoding"),
        ("request_timeout_s", "decoding"),
    ],
)
async def test_a_limit_is_answered_504_and_frees_both_legs(
    start_router: StartRouter, setting: str, phase: str
) -> None:
    cluster = await start_router(**{setting: 2.0})
    prefill = await cluster.add_prefill()
    decode = await cluster.add_decode()
    async with aiohttp.ClientSession(cluster.url) as http:
        async with http.post("/v1/completions", json=BODY) as response:
            assert (await response.json())["choices"][0]["text"] == ANSWER
        if phase == "decoding":
            decode.hold_after = 3
        else:
            decode.claim_s = LONG_S  # queues count
        async with http.post("/v1/completions", json=BODY) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (504, "timeout")
            assert response.headers["x-should-retry"] == "false"
        assert f"(router.{setting}) are over while {phase}" in error["message"]
        await until(lambda: len(decode.aborted) == 1)
        assert decode.requests == {}
        if phase != "decoding":
            await until(lambda: len(prefill.cancelled) == 1)
