"""Workers die, leave and join while requests run: every one of them has its whole answer."""

from __future__ import annotations

import asyncio
import collections
import random

import aiohttp

from tests.router.conftest import ANSWER, MODEL, Cluster, StartRouter
from tests.router.fakes import FakeDecode, FakePrefill

NUM_REQUESTS = 240
PACE = 6
"""Answers between two changes, at least."""
NUM_CHANGES = 40
TIMEOUT_S = 240.0


async def change_a_worker(cluster: Cluster, draw: random.Random, number: int) -> None:
    """One joins, then one of the same role dies silently or leaves in order."""
    role = draw.choice(["prefill", "decode"])
    workers: list[FakePrefill] | list[FakeDecode]
    if role == "prefill":
        await cluster.add_prefill(f"prefill-{number}")
        workers = cluster.prefills
    else:
        await cluster.add_decode(f"decode-{number}")
        workers = cluster.decodes
    victim = workers.pop(draw.randrange(len(workers) - 1))
    if draw.random() < 0.5:
        await victim.die()
    else:
        await victim.close()


async def test_no_request_is_lost_while_workers_come_and_go(start_router: StartRouter) -> None:
    cluster = await start_router(
        request_timeout_s=TIMEOUT_S, worker_wait_s=TIMEOUT_S, lease_ttl_s=2.0
    )
    for index in range(2):
        await cluster.add_prefill(f"prefill-{index}")
        await cluster.add_decode(f"decode-{index}")
    draw = random.Random(3)
    outcomes: collections.Counter[str] = collections.Counter()
    gate = asyncio.Semaphore(24)

    async def one(http: aiohttp.ClientSession) -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 100}
        async with gate, http.post("/v1/completions", json=body) as response:
            answer = await response.json()
            if response.status == 200:
                assert answer["choices"][0]["text"] == ANSWER
                outcomes["success"] += 1
            else:
                assert answer["error"]["request_id"] == response.headers["x-request-id"]
                outcomes[answer["error"]["message"]] += 1

    async def churn() -> None:
        for number in range(2, 2 + NUM_CHANGES):
            await change_a_worker(cluster, draw, number)
            # By progress, not by time: a slow machine is to see as many changes a request.
            enough = min(outcomes.total() + PACE, NUM_REQUESTS)
            while outcomes.total() < enough:
                await asyncio.sleep(0.005)

    async with aiohttp.ClientSession(cluster.url) as http, asyncio.timeout(TIMEOUT_S + 10):
        changing = asyncio.create_task(churn())
        await asyncio.gather(*(one(http) for _ in range(NUM_REQUESTS)))
        await changing
        async with http.get("/status") as response:
            assert (await response.json())["num_requests_in_flight"] == 0
    assert sum(outcomes.values()) == NUM_REQUESTS
    assert outcomes["success"] == NUM_REQUESTS, outcomes
