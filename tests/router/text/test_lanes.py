"""Long work leaves the event loop alone, and nobody works for who has left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from router.text.lanes import INLINE_BYTES, LONG_BYTES, Lanes
from router.text.tokenizer import BATCH_TEXTS, Tokenizer


@pytest.fixture
async def lanes() -> AsyncIterator[Lanes]:
    lanes = Lanes()
    yield lanes
    lanes.close()


async def test_short_work_is_done_at_once_and_long_work_elsewhere(lanes: Lanes) -> None:
    def place(_: object) -> str:
        return threading.current_thread().name

    here = place(None)
    assert await lanes.run(INLINE_BYTES, place) == here
    assert (await lanes.run(INLINE_BYTES + 1, place)).startswith("text")
    assert (await lanes.run(LONG_BYTES + 1, place)).startswith("long-text")


async def test_the_longest_work_holds_up_only_its_like(lanes: Lanes) -> None:
    go = threading.Event()
    longest = asyncio.create_task(lanes.run(LONG_BYTES + 1, lambda _: go.wait(60)))
    assert await lanes.run(LONG_BYTES, lambda _: "short") == "short"
    go.set()
    assert await longest


async def test_work_for_who_has_left_is_dropped(lanes: Lanes) -> None:
    running, has_left = threading.Event(), threading.Event()
    done: list[str] = []

    def wait_until_abandoned(is_abandoned: Callable[[], bool]) -> None:
        running.set()
        while not is_abandoned():
            has_left.wait(0.01)
        done.append("told")

    first = asyncio.create_task(lanes.run(LONG_BYTES + 1, wait_until_abandoned))
    await asyncio.to_thread(running.wait, 60)
    second = asyncio.create_task(lanes.run(LONG_BYTES + 1, lambda _: done.append("queued")))
    await asyncio.sleep(0)
    assert lanes.num_pending == 2
    second.cancel()
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert lanes.num_pending == 0
    await lanes.run(LONG_BYTES + 1, lambda _: done.append("next"))
    assert done == ["told", "next"]


def test_many_texts_are_encoded_as_one_by_one(tokenizer: Tokenizer) -> None:
    texts = ["fox", "", "the quick " * 50, "h\u00f6"] * BATCH_TEXTS
    for special in (False, True):
        together = tokenizer.encode_all(texts, add_special_tokens=special)
        assert together == [tokenizer.encode(t, add_special_tokens=special) for t in texts]


def test_encoding_stops_when_nobody_waits(tokenizer: Tokenizer) -> None:
    answers = iter([False, True])
    found = tokenizer.encode_all(
        ["fox"] * 4 * BATCH_TEXTS, add_special_tokens=False, is_abandoned=lambda: next(answers)
    )
    assert len(found) == BATCH_TEXTS


def test_no_token_is_longer_than_counted_with(tokenizer: Tokenizer) -> None:
    text = "the quick brown fox " * 20
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(text) <= tokenizer.most_chars(len(ids))
