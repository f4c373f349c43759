"""A model is listed once it can be served; a burst waits; errors are counted by our codes."""

from __future__ import annotations

import asyncio

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.router.conftest import MODEL, Cluster, StartRouter
from tests.router.fakes import SECRET, FakeDecode
from tests.router.outputs import MAX_MODEL_LEN
from tests.waiting import until

COMPLETION = {"model": MODEL, "prompt": "hi", "max_tokens": 8}


async def models(http: aiohttp.ClientSession) -> list[str]:
    async with http.get("/v1/models") as response:
        assert response.status == 200
        return [card["id"] for card in (await response.json())["data"]]


async def code_of(http: aiohttp.ClientSession, method: str, path: str) -> tuple[int, str]:
    body = COMPLETION if method == "POST" else None
    async with http.request(method, path, json=body) as response:
        return response.status, (await response.json())["error"]["code"]


async def test_a_model_is_listed_once_it_can_be_served(start_router: StartRouter) -> None:
    cluster = await start_router(lease_ttl_s=3.0)
    async with aiohttp.ClientSession(cluster.url) as http:
        for _ in range(2):
            assert await models(http) == []
            assert await code_of(http, "GET", f"/v1/models/{MODEL}") == (404, "server_not_ready")
            assert await code_of(http, "POST", "/v1/completions") == (503, "server_not_ready")
            if not cluster.prefills:
                await cluster.add_prefill()
        decode = await cluster.add_decode()
        assert await models(http) == [MODEL]
        async with http.get(f"/v1/models/{MODEL}") as response:
            assert response.status == 200
        # Workers that went are awaited: the model stays listed.
        await decode.die()
        pool = cluster.service._http.backends.default.pool  # type: ignore[union-attr]
        await until(lambda: len(pool.members()) < 2)
        assert await models(http) == [MODEL]
        assert (await code_of(http, "POST", "/v1/completions"))[1] != "server_not_ready"
        async with http.get("/ready") as response:
            assert response.status == 503


async def test_a_router_that_was_started_again_waits_for_its_workers(
    start_router: StartRouter,
) -> None:
    cluster = await start_router(worker_wait_s=60.0)

    async def ask(http: aiohttp.ClientSession) -> int:
        async with http.post("/v1/completions", json=COMPLETION) as response:
            return response.status

    async with aiohttp.ClientSession(cluster.url) as http:
        asked = asyncio.create_task(ask(http))
        async with http.get("/ready") as response:
            assert response.status == 503
        await cluster.add_prefill()
        assert await models(http) == []
        assert not asked.done()
        await cluster.add_decode()
        assert await asked == 200


async def test_a_burst_waits_and_is_served(start_router: StartRouter) -> None:
    cluster = await start_router(max_concurrent_requests=8, lease_ttl_s=30)
    await cluster.add_prefill()
    decode = await cluster.add_decode()
    decode.step_s = 0.005
    most_at_once = 0

    async def ask(http: aiohttp.ClientSession) -> int:
        nonlocal most_at_once
        async with http.post("/v1/completions", json=COMPLETION) as response:
            most_at_once = max(most_at_once, len(decode.requests))
            return response.status

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(cluster.url, connector=connector) as http:
        answers = await asyncio.gather(*(ask(http) for _ in range(100)))
        async with http.get("/status") as response:
            status = await response.json()
    assert answers == [200] * 100
    assert most_at_once <= 8
    assert status["max_requests_in_flight"] == 8
    assert status["num_requests_waiting"] == status["num_requests_in_flight"] == 0


async def test_the_limit_follows_the_decode_ranks(start_router: StartRouter) -> None:
    cluster = await start_router()

    async def limit(http: aiohttp.ClientSession) -> int:
        async with http.get("/status") as response:
            return int((await response.json())["max_requests_in_flight"])

    async with aiohttp.ClientSession(cluster.url) as http:
        await cluster.add_decode(max_num_requests=40)
        assert await limit(http) == 30
        await cluster.add_decode("decode-1", max_num_requests=60)
        assert await limit(http) == 75
        cluster.decodes[1].set_draining()
        pool = cluster.service._http.backends.default.pool  # type: ignore[union-attr]
        await until(lambda: any(member.draining for member in pool.members()))
        assert await limit(http) == 30
        await cluster.decodes[1].close()
        await until(lambda: len(pool.members()) == 1)
        assert await limit(http) == 30


async def test_routers_share_the_decode_ranks_and_the_last_one_has_them_alone(
    start_router: StartRouter,
) -> None:
    clusters = [await start_router(lease_ttl_s=3.0) for _ in range(2)]
    decode = FakeDecode("decode-0", MODEL, clusters[0].script, max_num_requests=40)
    clusters[0].decodes.append(decode)
    await decode.start(",".join(cluster.control for cluster in clusters))
    admissions = [cluster.service._http.backends.default.admission for cluster in clusters]  # type: ignore[union-attr]
    await until(lambda: [one.limit for one in admissions] == [15, 15])
    await clusters[1].service.shutdown()
    await until(lambda: admissions[0].limit == 30)


async def test_draining_answers_who_waits_in_the_queue(start_router: StartRouter) -> None:
    cluster = await start_router(max_concurrent_requests=1)
    await cluster.add_prefill()
    decode = await cluster.add_decode()
    decode.step_s = 0.05
    async with aiohttp.ClientSession(cluster.url) as http:
        first = asyncio.create_task(http.post("/v1/completions", json=COMPLETION))
        await until(lambda: bool(decode.seen))
        second = asyncio.create_task(code_of(http, "POST", "/v1/completions"))
        server = cluster.service._http
        assert server is not None
        await until(lambda: server.backends.default.admission.num_waiting == 1)
        drained = asyncio.create_task(cluster.service.drain())
        assert await second == (503, "server_is_draining")
        async with await first as response:
            assert response.status == 200
        await drained


async def error_counts(http: aiohttp.ClientSession) -> dict[str, float]:
    """Of errors that happened."""
    async with http.get("/metrics") as response:
        text = await response.text()
    (family,) = [
        family
        for family in text_string_to_metric_families(text)
        if family.name == "pd_router_request_errors"
    ]
    return {
        sample.labels["code"]: sample.value
        for sample in family.samples
        if sample.name.endswith("_total") and sample.value
    }


async def test_errors_are_counted_by_our_codes_and_scanners_are_not(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    cluster.prefill.run_error = None
    for fields in ({"n": 0}, {"model": "other"}, {"suffix": "x"}, {"prompt": "a " * 400}):
        async with http.post("/v1/completions", json={**COMPLETION, **fields}):
            pass
    for path in ("/", "/wp-login.php", "/v1/completions"):
        async with http.get(path):
            pass
    assert await error_counts(http) == {
        "invalid_request": 1,
        "model_not_found": 1,
        "unsupported_value": 1,
        "context_length_exceeded": 1,
    }


async def test_a_wrong_method_or_url_says_what_is_right(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    async with http.get("/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
    async with http.post("/v1/v1/chat/completions", json={}) as response:
        assert response.status == 404
        assert "/v1/chat/completions: the client adds /v1" in await response.text()
    async with http.get("/v1/embeddings") as response:
        message = (await response.json())["error"]["message"]
        assert "/v1/completions, " in message
        assert "/console" not in message
        assert "/status" not in message
    for path in ("/models", "/models/some/name", "/chat/completions"):
        async with http.get(path) as response:
            assert response.status == 404
            assert f"Fix: did you mean /v1{path}? The base URL" in await response.text()


async def test_what_is_served_is_told(http: aiohttp.ClientSession, cluster: Cluster) -> None:
    async with http.get("/version") as response:
        version = (await response.json())["version"]
        assert version[0].isdigit()
    async with http.get(f"/v1/models/{MODEL}") as response:
        card = await response.json()
    assert card["max_model_len"] == MAX_MODEL_LEN
    assert {"chat", "completions", "return_token_ids"} <= set(card["features"])
    async with http.get("/server_info") as response:
        text = await response.text()
        info = await response.json()
    assert info["version"] == version
    assert info["model"] == card
    assert info["ready"] is True
    assert info["workers"] == {"prefill": 1, "decode": 1}
    assert info["limits"]["max_body_bytes"] == 8 * 2**20
    assert SECRET not in text
    assert "127.0.0.1" not in text  # workers' addresses are not for clients
