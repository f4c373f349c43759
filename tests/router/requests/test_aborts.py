"""The end of a request reaches decode, or it is counted that it did not."""

from __future__ import annotations

import asyncio

import aiohttp

from router.metrics.core import RouterMetrics
from router.metrics.model import ModelMetrics
from router.pool.members import Member, Role, WorkerKey
from router.requests.aborts import Aborts
from router.requests.clients import WorkerClients
from tests.router.conftest import MODEL, Cluster
from tests.router.fakes import CREDENTIALS
from tests.waiting import until

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 100}


def member_at(address: str) -> Member:
    return Member(
        key=WorkerKey("decode-0", 1, 0),
        role=Role.DECODE,
        address=address,
        num_ranks=1,
        model=MODEL,
        max_model_len=64,
        layout_fingerprint="",
        transport="loopback",
    )


def num_lost(metrics: RouterMetrics) -> float:
    value = metrics.registry.get_sample_value("pd_router_lost_aborts_total")
    assert value is not None
    return value


async def test_an_abort_that_fails_is_repeated_until_it_is_heard(http, cluster: Cluster) -> None:
    cluster.decode.hold_after = 3
    cluster.decode.abort_failures = 2
    task = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await until(lambda: any(r.sent for r in cluster.decode.requests.values()))
    task.cancel()
    await until(lambda: not cluster.decode.requests)
    assert len(cluster.decode.aborted) == 1
    assert cluster.decode.abort_failures == 0


async def test_an_abort_of_a_life_that_is_over_is_not_repeated() -> None:
    clients, metrics = WorkerClients(CREDENTIALS), RouterMetrics()
    asked: list[WorkerKey] = []

    def is_alive(key: WorkerKey) -> bool:
        asked.append(key)
        return len(asked) < 3

    aborts = Aborts(clients, ModelMetrics(metrics, "m"), is_alive=is_alive)
    aborts.send(member_at("127.0.0.1:1"), "r", "over")
    async with asyncio.timeout(60):
        while aborts.num_pending:
            await asyncio.sleep(0.005)
    assert len(asked) == 3
    assert num_lost(metrics) == 0
    await clients.close()


async def test_an_abort_is_given_up_in_the_end_and_counted() -> None:
    clients, metrics = WorkerClients(CREDENTIALS), RouterMetrics()
    aborts = Aborts(clients, ModelMetrics(metrics, "m"), is_alive=lambda _: True, total_s=0.3)
    aborts.send(member_at("127.0.0.1:1"), "r", "over")
    async with asyncio.timeout(60):
        while aborts.num_pending:
            await asyncio.sleep(0.005)
    assert num_lost(metrics) == 1
    await clients.close()


async def test_the_end_of_the_process_waits_for_no_worker_that_is_away() -> None:
    clients, metrics = WorkerClients(CREDENTIALS), RouterMetrics()
    aborts = Aborts(clients, ModelMetrics(metrics, "m"), is_alive=lambda _: True)
    aborts.send(member_at("127.0.0.1:1"), "r", "over")
    await asyncio.sleep(0.2)
    await asyncio.wait_for(aborts.close(), 60)
    assert aborts.num_pending == 0
    assert num_lost(metrics) == 1
    await clients.close()


async def test_a_router_ends_while_a_worker_does_not_answer(http, cluster: Cluster) -> None:
    cluster.decode.hold_after = 3
    cluster.decode.abort_failures = 1 << 30
    task = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await until(lambda: any(r.sent for r in cluster.decode.requests.values()))
    task.cancel()
    async with aiohttp.ClientSession(cluster.url) as other, other.get("/status") as response:
        assert response.status == 200
