"""A router whose ranks are slow says so, and serves as before."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from bench.ranks.played import Fault, play
from router.pool.members import WorkerKey
from runtime.stragglers.rank_picture import block_to_proto
from tests.router.conftest import MODEL, Cluster
from tests.router.pool.test_rank_watch import blocks_of

SLOW = "decode-0: 1 x slow_sender. Fix: see `tandem ranks`"


async def answer(http: aiohttp.ClientSession, path: str) -> tuple[int, dict[str, Any]]:
    async with http.get(path) as response:
        return response.status, await response.json()


async def test_slow_ranks_are_told_and_nothing_is_refused(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    assert await answer(http, "/ready") == (200, {"status": "ready"})
    (window,) = play(1, 4, Fault(ranks=(2,), attention=1.5), seed=3)
    for rank in range(4):
        key = WorkerKey("decode-0", cluster.decode.identity.epoch, rank)
        cluster.ranks.heard(key, 4, [block_to_proto(block) for block in blocks_of(window, rank)])
    await cluster.add_decode("decode-1")  # a change of the pool: ranks are told with it
    told: list[str] = []
    async with asyncio.timeout(60):
        while not told:
            status, body = await answer(http, "/ready")
            assert (status, body["status"]) == (200, "ready")
            told = body.get("degraded", [])
            await asyncio.sleep(0.01)
    assert told == [SLOW]
    assert (await answer(http, f"/ready?model={MODEL}"))[1]["degraded"] == [SLOW]
    status, body = await answer(http, "/status")
    assert (status, body["ready"], body["degraded"]) == (200, True, [SLOW])
    assert await answer(http, "/health") == (200, {"status": "ok"})
    async with http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 2}
    ) as response:
        assert response.status == 200
