"""The headers of routing: why this pair, and which conversation."""

from __future__ import annotations

import aiohttp
import orjson
import pytest

from router.http.access.routing_headers import CONVERSATION_HEADER, ROUTING_HEADER
from tests.router.conftest import MODEL, Cluster, StartRouter

BODY = {"model": MODEL, "prompt": "the quick brown fox", "max_tokens": 4}


async def started(start_router: StartRouter, policy: str) -> Cluster:
    cluster = await start_router(policy=policy)
    await cluster.add_pair()
    return cluster


async def why(cluster: Cluster, *, headers: dict[str, str] | None = None, **fields: object) -> dict:  # type: ignore[type-arg]
    headers = {ROUTING_HEADER: "1", **(headers or {})}
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{cluster.url}/v1/completions", json={**BODY, **fields}, headers=headers
        ) as response,
    ):
        await response.read()
        assert response.status == 200
        answer: dict[str, object] = orjson.loads(response.headers[ROUTING_HEADER])
        return answer


@pytest.mark.parametrize("is_stream", [True, False])
async def test_says_why_this_pair(start_router: StartRouter, is_stream: bool) -> None:
    cluster = await started(start_router, "predicted-ttft")
    answer = await why(cluster, stream=is_stream)
    assert answer["policy"] == "predicted-ttft"
    assert answer["prefill"] == f"{cluster.prefill.instance}/0"
    assert answer["decode"] == f"{cluster.decode.instance}/0"
    parts = ("queue_s", "compute_s", "transfer_s", "room_s")
    total = sum(answer[part] for part in parts)
    assert answer["predicted_ttft_s"] == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize(
    "said", [{"headers": {CONVERSATION_HEADER: "c"}}, {"prompt_cache_key": "c"}]
)
async def test_a_conversation_is_kept(start_router: StartRouter, said: dict) -> None:  # type: ignore[type-arg]
    cluster = await started(start_router, "prefix-affinity")
    assert (await why(cluster, **said))["conversation"] == "none"
    assert (await why(cluster, **said))["conversation"] == "kept"
    long = {CONVERSATION_HEADER: "x" * 500}
    assert (await why(cluster, headers=long))["conversation"] == "none"


async def test_says_nothing_where_nobody_asks_or_nothing_is_followed(
    start_router: StartRouter,
) -> None:
    for policy, headers in (("least-loaded", {ROUTING_HEADER: "1"}), ("predicted-ttft", {})):
        cluster = await started(start_router, policy)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{cluster.url}/v1/completions", json=BODY, headers=headers) as response,
        ):
            assert response.status == 200
            assert ROUTING_HEADER not in response.headers
