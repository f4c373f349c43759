"""A request leaves a decode rank without room for one that has some: once, orderly, for nobody's
fault.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest

from router.pool.members import Member
from router.pool.view import PoolView
from router.requests import capacity as capacity_module
from router.requests import pipeline as pipeline_module
from router.requests.capacity import SpareCapacity
from router.routing.policy import Pair, PairingPolicy
from router.routing.request_shape import RequestShape
from runtime.tiers import Standing
from tests.router.conftest import ANSWER, Cluster, StartRouter
from tests.router.deltas import tell_load
from tests.router.fakes import FakeDecode
from tests.router.requests.test_migration import answer_of, metric
from tests.router.routing.pools import decode, load, pool_of, prefill
from tests.waiting import until

BLOCKED = load(3, num_requests_blocked=1, num_total_blocks=10)
OPEN = load(1, num_free_blocks=10, num_total_blocks=10)
FULL = load(1, num_free_blocks=1, num_total_blocks=10)
SHAPE = RequestShape(num_context_tokens=300)  # 5 blocks of 64
NUM_TOKENS = SHAPE.num_tokens_needed


def capacity_of(*members: Member) -> tuple[PoolView, SpareCapacity]:
    pool = pool_of(*members)
    policy = PairingPolicy("least-loaded")
    return pool, SpareCapacity(pool, lambda shape: policy.pick(shape, pool))


def found(future: asyncio.Future[Pair]) -> str:
    return future.result().decode.key.instance if future.done() else "none"


async def test_who_waits_longest_is_shown_the_room_and_no_crowd_follows() -> None:
    members = prefill(0), prefill(1), decode(0, load=BLOCKED), decode(1, load=OPEN)
    _, capacity = capacity_of(*members)
    pair = Pair(members[1], members[2])
    with contextlib.ExitStack() as stack:
        waiting = [
            stack.enter_context(capacity.seek(pair, lambda: SHAPE, 0.0, num_tokens=NUM_TOKENS))
            for _ in range(4)
        ]
        capacity.look()
        assert [found(each) for each in waiting] == [
            "decode-1",
            "decode-1",
            *2 * ["none"],
        ]
        assert waiting[0].result().prefill is pair.prefill, "it has a place in this queue"
        # Those that went have their blocks: the reports know of them.
        stack.pop_all().close()
    with capacity.seek(pair, lambda: SHAPE, 0.0, num_tokens=NUM_TOKENS) as elsewhere:
        capacity.look()
        assert found(elsewhere) == "decode-1"


async def test_the_first_tier_is_shown_the_room_though_it_came_last() -> None:
    members = prefill(0), decode(0, load=BLOCKED), decode(1, load=OPEN)
    _, capacity = capacity_of(*members)
    pair = Pair(members[0], members[1])
    with contextlib.ExitStack() as stack:
        waiting = [
            stack.enter_context(
                capacity.seek(
                    pair, lambda: SHAPE, 0.0, Standing(order=order), num_tokens=NUM_TOKENS
                )
            )
            for order in (2, 1, 2, 0)
        ]
        capacity.look()
        assert [found(each) for each in waiting] == [
            "none",
            "decode-1",
            "none",
            "decode-1",
        ]


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (BLOCKED, FULL),
        (BLOCKED, BLOCKED),
        (BLOCKED, load(1)),  # says nothing of blocks
        (OPEN, OPEN),
        (FULL, OPEN),  # full, but nobody waits there for blocks
    ],
)
async def test_nobody_moves_without_need_or_to_no_room(own, other) -> None:
    members = prefill(0), decode(0, load=own), decode(1, load=other)
    _, capacity = capacity_of(*members)
    with capacity.seek(
        Pair(members[0], members[1]), lambda: SHAPE, 0.0, num_tokens=NUM_TOKENS
    ) as elsewhere:
        capacity.look()
        capacity.look()
        assert found(elsewhere) == "none"


@pytest.mark.parametrize(
    "change",
    [{"draining": True}, {"layout_fingerprint": "another"}, {"max_num_requests": 1}],
)
async def test_nobody_moves_to_a_rank_that_cannot_take_it(change: dict[str, object]) -> None:
    members = prefill(0), decode(0, load=BLOCKED), decode(1, load=OPEN, **change)
    _, capacity = capacity_of(*members)
    with capacity.seek(
        Pair(members[0], members[1]), lambda: SHAPE, 0.0, num_tokens=NUM_TOKENS
    ) as elsewhere:
        capacity.look()
        assert found(elsewhere) == "none"


async def test_a_rank_that_is_blocked_for_a_moment_is_not_left() -> None:
    members = prefill(0), decode(0, load=BLOCKED), decode(1, load=OPEN)
    pool, capacity = capacity_of(*members)
    with capacity.seek(
        Pair(members[0], members[1]), lambda: SHAPE, 3600.0, num_tokens=NUM_TOKENS
    ) as elsewhere:
        capacity.look()
        (request,) = capacity._waiting
        assert request.blocked_since is not None
        pool.report(members[1].key, OPEN)
        capacity.look()
        assert request.blocked_since is None, "its patience begins anew"
        assert found(elsewhere) == "none"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "LOOK_S", 0.02)
    monkeypatch.setattr(pipeline_module, "PATIENCE_S", 0.05)


@pytest.fixture
async def cluster(start_router: StartRouter) -> Cluster:
    """One decode rank without room, of which no request may move because of a failure."""
    cluster = await start_router(max_migrations=0)
    await cluster.add_pair()
    return cluster


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cluster.url) as session:
        yield session


async def add_roomy(cluster: Cluster) -> FakeDecode:
    other = await cluster.add_decode("decode-1")
    await until(lambda: other.num_streams > 0)
    tell_load(other)
    return other


async def test_a_request_moves_to_room_and_nobody_is_to_blame(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    cluster.decode.blocks = asyncio.Event()
    task = asyncio.create_task(answer_of(http))
    await until(lambda: bool(cluster.prefill.seen))
    other = await add_roomy(cluster)
    tell_load(cluster.decode)
    answer = await asyncio.wait_for(task, 60)
    assert answer["choices"][0]["text"] == ANSWER
    first, second = cluster.prefill.seen
    assert (first.waited_s, second.waited_s > 0.0) == (0.0, True), "it keeps its turn"
    assert [request.request_id for request in other.seen] == [f"{first.request_id}-r1"]
    await until(lambda: not cluster.decode.requests)
    assert await metric(http, "pd_router_room_moves_total") == 1
    assert await metric(http, "pd_router_migrations_total") == 0
    pool = cluster.service._http.backends.default.pool  # type: ignore[union-attr]
    assert not pool.failing()
    cluster.decode.blocks.set()


async def test_a_request_with_its_ticket_stays(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    """Its prompt is being computed, and others of its rank wait for blocks."""
    cluster.prefill.holds_runs = True
    task = asyncio.create_task(answer_of(http))
    await until(lambda: cluster.prefill.num_computed == 1)
    cluster.decode.blocks = asyncio.Event()
    other = await add_roomy(cluster)
    tell_load(cluster.decode)
    await until(lambda: bool(cluster.decode.kept))
    cluster.prefill.go_on.set()
    assert (await asyncio.wait_for(task, 60))["choices"][0]["text"] == ANSWER
    assert not other.seen
    assert len(cluster.decode.kept) == 1, "it is not asked again and again"


async def test_a_request_that_has_tokens_does_not_move(
    http: aiohttp.ClientSession, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = count_looks(monkeypatch)
    cluster.decode.hold_after = 3
    task = asyncio.create_task(answer_of(http))
    await until(lambda: any(r.sent for r in cluster.decode.requests.values()))
    cluster.decode.blocks = asyncio.Event()
    other = await add_roomy(cluster)
    tell_load(cluster.decode)
    cluster.prefill.holds_runs = True
    waiting = asyncio.create_task(answer_of(http))  # so that there are looks at all
    await until(lambda: len(looks) > 10 and bool(other.seen))
    cluster.decode.go_on.set()
    cluster.prefill.go_on.set()
    assert (await asyncio.wait_for(task, 60))["choices"][0]["text"] == ANSWER
    await asyncio.wait_for(waiting, 60)
    assert len(cluster.decode.kept) == 0
    cluster.decode.blocks.set()


async def test_a_request_does_not_swing_between_ranks(
    http: aiohttp.ClientSession, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_module, "PATIENCE_GROWTH", 1e6)
    looks = count_looks(monkeypatch)
    cluster.decode.blocks = asyncio.Event()
    task = asyncio.create_task(answer_of(http))
    await until(lambda: bool(cluster.prefill.seen))
    other = await add_roomy(cluster)
    tell_load(cluster.decode)
    other.blocks = asyncio.Event()
    await until(lambda: len(cluster.prefill.seen) == 2 and not cluster.decode.requests)
    tell_load(other)
    tell_load(cluster.decode)  # now it has room
    since = len(looks)
    await until(lambda: len(looks) > since + 20)
    assert len(cluster.decode.seen) == 1, "it was here before"
    other.blocks.set()
    assert (await asyncio.wait_for(task, 60))["choices"][0]["text"] == ANSWER
    cluster.decode.blocks.set()


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    looks: list[None] = []
    look = SpareCapacity.look

    def counted(capacity: SpareCapacity) -> None:
        looks.append(None)
        look(capacity)

    monkeypatch.setattr(SpareCapacity, "look", counted)
    return looks
