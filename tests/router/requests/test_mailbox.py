"""A mailbox tells its listener once a turn, and keeps what nobody takes."""

from __future__ import annotations

import asyncio

from router.requests.generation import Mailbox, Output


def token(number: int) -> Output:
    return Output(0, (number,))


async def test_what_comes_in_one_turn_is_one_call() -> None:
    mailbox, calls = Mailbox(), []
    mailbox.put(token(1))
    mailbox.listen(lambda: calls.append(mailbox.take_now()))
    mailbox.put(token(2))
    assert calls == []
    await asyncio.sleep(0)
    mailbox.put(token(3))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert calls == [[token(1), token(2)], [token(3)]]
    mailbox.listen(None)
    mailbox.put(token(4))
    await asyncio.sleep(0)
    assert len(calls) == 2
    assert await mailbox.take() == [token(4)]


async def test_what_a_listener_leaves_stays_until_it_is_too_much() -> None:
    overflows = []
    mailbox = Mailbox(1000, lambda: overflows.append(True))
    calls: list[int] = []
    mailbox.listen(lambda: calls.append(1))
    for number in range(20):
        mailbox.put(token(number))
        await asyncio.sleep(0)
    assert overflows == [True]
    taken = [output.token_ids[0] for output in mailbox.take_now()]
    assert taken == list(range(len(taken)))
    assert 1 < len(taken) < 20
    assert len(calls) <= 20
