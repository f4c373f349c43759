"""Long work leaves the event loop alone, and nobody works for who has left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable

import pytest

from router.text.lanes import INLINE_BYTES, LONG_BYTES, Lanes
from router.text.tokenizer import BATCH_TEXTS, Tokenizer
from tests.router.text.payers import Tenant
from tests.waiting import until


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


async def test_a_tenant_waits_for_one_piece_of_work_of_another_and_not_for_all(
    lanes: Lanes,
) -> None:
    go, done = threading.Event(), list[str]()
    crowd, alone = Tenant("crowd"), Tenant("alone")

    def work(name: str) -> Callable[[object], None]:
        def run(_: object) -> None:
            go.wait(60)
            done.append(name)

        return run

    long = LONG_BYTES + 1
    waiting = [asyncio.create_task(lanes.run(long, work("crowd"), crowd)) for _ in range(32)]
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(lanes.run(long, work("alone"), alone)))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*waiting)
    assert done.index("alone") <= 1
    assert (len(crowd.paid_s), len(alone.paid_s)) == (32, 1)


async def test_seconds_of_cpu_are_paid_for_wherever_they_are_spent_and_who_has_left_pays(
    lanes: Lanes,
) -> None:
    running, go = threading.Event(), threading.Event()

    def spend(_: object) -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    def fail(_: object) -> None:
        spend(_)
        raise ValueError("no text")

    def linger(_: object) -> None:
        running.set()
        go.wait(60)
        spend(_)

    tenant = Tenant("alice")
    for num_bytes in (INLINE_BYTES, LONG_BYTES, LONG_BYTES + 1):
        await lanes.run(num_bytes, spend, tenant)
        with pytest.raises(ValueError, match="no text"):
            await lanes.run(num_bytes, fail, tenant)
    leaving = asyncio.create_task(lanes.run(LONG_BYTES + 1, linger, tenant))
    await asyncio.to_thread(running.wait, 60)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert len(tenant.paid_s) == 6
    go.set()
    await until(lambda: len(tenant.paid_s) == 7)
    assert all(0.02 <= paid < 10 for paid in tenant.paid_s)


class Text:
    """What work is about; a reference to it is weak."""


async def test_work_that_fails_leaves_nothing_for_the_garbage_collector(lanes: Lanes) -> None:
    """8 MiB each, and a collector that stops the event loop."""
    kept: list[weakref.ref[Text]] = []

    async def fail() -> None:
        text = Text()
        kept.append(weakref.ref(text))

        def work(_: object) -> None:
            raise ValueError(f"{text} is no request")

        with contextlib.suppress(ValueError):
            await lanes.run(LONG_BYTES + 1, work, Tenant("alice"))

    gc.disable()
    try:
        await fail()
        await asyncio.sleep(0)
        assert kept[0]() is None
    finally:
        gc.enable()


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
