"""What failures say of workers: for how long, and whose KV is where."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from router.pool.members import Member, Role, WorkerKey
from router.pool.readiness import Readiness
from router.pool.view import PoolView
from router.requests import pairing as pairing_module
from router.requests.generation import Generation, Mailbox
from router.requests.pairing import PairFinder, Pairing
from router.routing.policy import NoWorkersError, Pair, PairingPolicy
from runtime.errors import OverloadedError, PeerLostError
from runtime.sampling import SamplingParams

LOST = PeerLostError("gone")


def member(role: Role, number: int, epoch: int = 1) -> Member:
    return Member(
        key=WorkerKey(f"{role.value}-{number}", epoch, 0),
        role=role,
        address="127.0.0.1:1",
        num_ranks=1,
        model="m",
        max_model_len=64,
        layout_fingerprint="",
        transport="loopback",
    )


def members(num_prefills: int, num_decodes: int) -> list[Member]:
    return [
        *(member(Role.PREFILL, number) for number in range(num_prefills)),
        *(member(Role.DECODE, number) for number in range(num_decodes)),
    ]


def pairing_of(found: Sequence[Member], wait_s: float = 0.0) -> tuple[PoolView, Pairing]:
    pool = PoolView(asyncio.get_running_loop().time)
    pool.update(found)
    policy, readiness = PairingPolicy("round-robin"), Readiness(pool)
    return pool, Pairing(pool, policy, readiness, worker_wait_s=wait_s)


def finder_of(pairing: Pairing) -> PairFinder:
    generation = Generation(
        request_id="r",
        index=0,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=8),
        cache_salt="",
        mailbox=Mailbox(),
        received=0.0,
    )
    return PairFinder(pairing, generation)


async def find(finder: PairFinder, failure: PeerLostError | None = LOST) -> Pair:
    return await finder.find(failure, is_under_way=False)


async def test_the_prefill_that_is_not_at_fault_is_kept() -> None:
    _, pairing = pairing_of(members(3, 3))
    finder = finder_of(pairing)
    pair = await find(finder, None)
    for _ in range(2):
        finder.note_failure(pair, {pair.decode.key}, has_prefilled=True)
        after = await find(finder)
        assert after.prefill.key == pair.prefill.key
        assert after.decode.key != pair.decode.key
        pair = after


async def test_a_prefill_at_fault_is_left_and_decode_is_not_suspected() -> None:
    _, pairing = pairing_of(members(3, 1))
    finder = finder_of(pairing)
    pair = await find(finder, None)
    finder.note_failure(pair, {pair.decode.key}, has_prefilled=True)
    finder = finder_of(pairing)
    finder.note_failure(pair, {pair.prefill.key}, has_prefilled=True)
    assert finder.shape().suspects == set()
    after = await find(finder)
    assert after.prefill.key != pair.prefill.key
    assert after.decode.key == pair.decode.key


async def test_where_nobody_is_at_fault_both_are_suspects() -> None:
    _, pairing = pairing_of(members(2, 2))
    finder = finder_of(pairing)
    pair = await find(finder, None)
    finder.note_failure(pair, set(), has_prefilled=True)
    after = await find(finder)
    assert set(after.keys).isdisjoint(pair.keys)
    finder.note_failure(after, set(), has_prefilled=True)
    assert await find(finder)  # the least suspect of all, but not nobody


async def test_what_was_said_of_a_worker_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who broke once serves again: nobody else is there."""
    monkeypatch.setattr(pairing_module, "FAILURE_COOLDOWN_S", 0.2)
    monkeypatch.setattr(pairing_module, "LOOK_AGAIN_S", 0.02)
    _, pairing = pairing_of(members(1, 1), wait_s=30.0)
    finder = finder_of(pairing)
    pair = await find(finder, None)
    finder.note_failure(pair, {pair.decode.key}, has_prefilled=True)
    assert await asyncio.wait_for(find(finder), 60) == pair


async def test_a_change_of_the_pool_wakes_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing_module, "LOOK_AGAIN_S", 60.0)
    pool, pairing = pairing_of(members(1, 1), wait_s=60.0)
    finder = finder_of(pairing)
    pair = await find(finder, None)
    finder.note_failure(pair, {pair.decode.key}, has_prefilled=True)
    tasks = [asyncio.create_task(find(finder)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in tasks)
    reborn = member(Role.DECODE, 0, epoch=2)
    pool.update([pair.prefill, reborn])
    async with asyncio.timeout(60):
        assert {(await task).decode.key for task in tasks} == {reborn.key}


async def test_who_does_not_wait() -> None:
    pool, pairing = pairing_of([], wait_s=60.0)
    finder = finder_of(pairing)
    async with asyncio.timeout(60):
        with pytest.raises(NoWorkersError):  # never ready
            await finder.find(None, is_under_way=False)
        assert not pairing.was_ready
        stranger = replace(member(Role.DECODE, 9), layout_fingerprint="another")
        pool.update([*members(1, 0), stranger])
        assert not pairing.was_ready, "no two of them are a pair"
        pool.update(members(1, 1))
        assert pairing.was_ready  # before anybody asked
        pair = await finder.find(None, is_under_way=False)
        finder.note_failure(pair, {pair.decode.key}, has_prefilled=False)
        with pytest.raises(NoWorkersError):  # full, and nothing is lost yet
            await finder.find(OverloadedError("full"), is_under_way=False)
