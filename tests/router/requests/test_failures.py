"""Workers that refuse, fail, die and come back; clients that go away. Every request is answered."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import orjson
import pytest

from runtime.errors import (
    DrainingError,
    InternalError,
    InvalidRequestError,
    OutOfBlocksError,
    OverloadedError,
    PeerLostError,
    RequestCancelledError,
    StaleTicketError,
    TransferFailedError,
)
from tests.router.conftest import ANSWER, MODEL, Cluster, StartRouter
from tests.waiting import until

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 100}


async def post(http: aiohttp.ClientSession, **change: object) -> tuple[int, dict]:
    async with http.post("/v1/completions", json={**BODY, **change}) as response:
        assert response.headers["x-request-id"]
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OverloadedError("no slot"), 503, "server_is_overloaded"),
        (OutOfBlocksError("too big"), 503, "out_of_kv_blocks"),
        (InternalError("bug"), 500, "internal_error"),
        (InvalidRequestError("no"), 400, "invalid_request"),
    ],
)
async def test_decode_rejects(http, cluster: Cluster, error, status: int, code: str) -> None:
    cluster.decode.reserve_error = error
    answered, body = await post(http)
    assert answered == status
    assert body["error"]["code"] == code
    assert body["error"]["message"] == error.message
    assert cluster.prefill.seen == []


@pytest.mark.parametrize(
    ("error", "status", "num_tries"),
    [
        (TransferFailedError("late"), 502, 3),
        (StaleTicketError("epoch"), 502, 3),
        (PeerLostError("decode died"), 502, 3),
        (DrainingError("ending"), 503, 1),
        (InternalError("bug"), 500, 1),
    ],
)
async def test_prefill_fails(start_router: StartRouter, error, status: int, num_tries: int) -> None:
    """There is one pair: it tries again where nobody is known to be at fault."""
    cluster = await start_router(max_migrations=2)
    prefill = await cluster.add_prefill()
    await cluster.add_decode()
    prefill.run_error = error
    async with aiohttp.ClientSession(cluster.url) as http:
        answered, body = await post(http)
    assert answered == status
    assert body["error"]["message"] == error.message
    await until(lambda: len(cluster.decode.aborted) == num_tries)
    assert cluster.decode.requests == {}


async def test_the_reason_of_a_revoked_ticket_is_decodes(http, cluster: Cluster) -> None:
    cluster.prefill.run_error = RequestCancelledError("decode revoked the ticket")
    task = asyncio.create_task(post(http))
    await until(lambda: len(cluster.decode.requests) == 1)
    await asyncio.sleep(0.05)
    cluster.decode.fail(OutOfBlocksError("evicted"))
    status, body = await task
    assert (status, body["error"]["code"]) == (503, "out_of_kv_blocks")
    # Where nobody says why, another try is worth it.
    seen = len(cluster.prefill.seen)
    task = asyncio.create_task(post(http))
    await until(lambda: len(cluster.prefill.seen) == seen + 1)
    cluster.prefill.run_error = None
    status, body = await task
    assert (status, body["choices"][0]["text"]) == (200, ANSWER)


async def test_a_cancel_that_is_not_the_clients_moves_the_request(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    """Prefill saw its connection to the router break before the router did, and gave its ticket
    up: decode's word of that comes first.
    """
    cluster.prefill.holds_runs = True
    task = asyncio.create_task(post(http))
    await until(lambda: cluster.prefill.num_computed == 1)
    cluster.decode.fail(RequestCancelledError("prefill-0 rank 0 abandoned the transfer"))
    cluster.prefill.go_on.set()
    status, body = await task
    assert (status, body["choices"][0]["text"]) == (200, ANSWER)
    assert [request.request_id[-3:] == "-r1" for request in cluster.prefill.seen] == [False, True]


async def test_another_pair_is_tried(http, cluster: Cluster) -> None:
    second = await cluster.add_decode("decode-1")
    await until(lambda: second.num_streams > 0)
    cluster.decode.reserve_error = OverloadedError("full")
    for _ in range(4):
        status, body = await post(http)
        assert (status, body["choices"][0]["text"]) == (200, ANSWER)
    assert len(cluster.decode.seen) >= 1
    retried = {request.request_id for request in second.seen}
    assert any(request_id.endswith("-r1") for request_id in retried)
    second.reserve_error = OverloadedError("full too")
    assert (await post(http))[0] == 503


async def test_a_request_fault_is_not_repeated(http, cluster: Cluster) -> None:
    await cluster.add_decode("decode-1")
    for decode in cluster.decodes:
        decode.reserve_error = InternalError("bug")
    await post(http)
    assert sum(len(decode.seen) for decode in cluster.decodes) == 1


async def test_an_error_in_the_middle_of_a_stream(client, cluster: Cluster) -> None:
    import openai

    cluster.decode.fail_after = 3
    stream = await client.completions.create(**BODY, stream=True)
    texts = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].text)

    with pytest.raises(openai.APIError) as caught:
        await read()
    assert "".join(texts) == cluster.text_of(3)
    assert caught.value.code == "out_of_kv_blocks"


async def test_a_broken_stream_still_ends_with_done(http, cluster: Cluster) -> None:
    cluster.decode.fail_after = 2
    async with http.post("/v1/completions", json={**BODY, "stream": True}) as response:
        request_id = response.headers["x-request-id"]
        events = (await response.read()).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    error = orjson.loads(events[-3].removeprefix(b"data: "))["error"]
    assert error["request_id"] == request_id
    assert error["type"] == "server_error"


async def test_a_gap_is_an_error_and_not_wrong_text(http, cluster: Cluster) -> None:
    cluster.decode.skip_token = 4
    status, body = await post(http)
    assert status == 500
    assert "token" in body["error"]["message"]


async def test_queueing_in_decode_is_no_failure(http, cluster: Cluster) -> None:
    cluster.decode.claim_s = 0.2
    assert (await post(http))[0] == 200


async def test_the_deadline_covers_every_wait(start_router: StartRouter) -> None:
    cluster = await start_router(request_timeout_s=2.0)
    prefill = await cluster.add_prefill()
    decode = await cluster.add_decode()
    async with aiohttp.ClientSession(cluster.url) as http:
        prefill.run_s = 5
        status, body = await post(http)
        assert (status, "waiting for prefill" in body["error"]["message"]) == (504, True)
        prefill.run_s, decode.hold_after = 0, 3
        status, body = await post(http)
        assert (status, "decoding" in body["error"]["message"]) == (504, True)
    await until(lambda: not decode.requests)
    await until(lambda: len(decode.aborted) == 2)
    assert len(prefill.cancelled) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
async def test_a_client_that_goes_away_frees_both_legs(
    http, cluster: Cluster, stream: bool, phase: str
) -> None:
    cluster.decode.claim_s = 30 if phase == "queued" else 0
    cluster.prefill.run_s = 30 if phase == "prefilling" else 0
    cluster.decode.hold_after = 3
    task = asyncio.create_task(post(http, stream=stream))
    await until(lambda: len(cluster.prefill.seen) == 1)
    if phase != "queued":
        await until(lambda: cluster.prefill.num_computed == 1)
    if phase == "decoding":
        await until(lambda: any(r.sent for r in cluster.decode.requests.values()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: len(cluster.decode.aborted) == 1)
    assert cluster.decode.requests == {}
    if phase != "decoding":
        await until(lambda: len(cluster.prefill.cancelled) == 1)
    async with http.get("/status") as response:
        assert (await response.json())["num_requests_in_flight"] == 0


async def test_decode_dies_while_it_streams(http, cluster: Cluster) -> None:
    cluster.decode.hold_after = 3
    task = asyncio.create_task(post(http))
    await until(lambda: any(r.sent for r in cluster.decode.requests.values()))
    await cluster.decode.die()
    status, body = await asyncio.wait_for(task, 60)
    assert status == 502
    assert body["error"]["code"] == "worker_lost"
    assert "decode-0" in body["error"]["message"]


async def test_a_dead_decode_is_noticed_at_once(http, cluster: Cluster) -> None:
    await cluster.decode.die()
    start = time.monotonic()
    status, body = await post(http)
    assert (status, body["error"]["code"]) == (502, "worker_lost")
    assert time.monotonic() - start < 15  # and not when the lease is over


async def test_prefill_dies_while_it_computes(http, cluster: Cluster) -> None:
    cluster.prefill.run_s = 30
    task = asyncio.create_task(post(http))
    await until(lambda: len(cluster.prefill.seen) == 1)
    await cluster.prefill.die()
    status, body = await asyncio.wait_for(task, 60)
    assert (status, body["error"]["code"]) == (502, "worker_lost")
    await until(lambda: len(cluster.decode.aborted) == 1)


async def test_a_dead_prefill_is_replaced_by_another_within_the_request(
    http, cluster: Cluster
) -> None:
    await cluster.add_prefill("prefill-1")
    for prefill in cluster.prefills:
        prefill.run_s = 0.2
    task = asyncio.create_task(post(http))
    await until(lambda: any(prefill.seen for prefill in cluster.prefills))
    victim = next(prefill for prefill in cluster.prefills if prefill.seen)
    await victim.die()
    status, body = await asyncio.wait_for(task, 60)
    assert (status, body["choices"][0]["text"]) == (200, ANSWER)


async def test_a_silent_worker_leaves_the_pool_and_may_return(start_router: StartRouter) -> None:
    cluster = await start_router(lease_ttl_s=3.0)
    await cluster.add_pair()
    async with aiohttp.ClientSession(cluster.url) as http:
        await leave_and_return(http, cluster)


async def leave_and_return(http: aiohttp.ClientSession, cluster: Cluster) -> None:
    port = int(cluster.decode.address.rpartition(":")[2])
    await cluster.decode.die()

    async def ready() -> int:
        async with http.get("/ready") as response:
            return response.status

    async with asyncio.timeout(60):
        while await ready() == 200:
            await asyncio.sleep(0.05)
    assert (await post(http))[0] == 503
    reborn = await cluster.add_decode("decode-0", port)
    await until(lambda: reborn.num_streams > 0)
    assert await ready() == 200
    assert (await post(http))[0] == 200


async def test_a_worker_replaced_behind_the_same_address(http, cluster: Cluster) -> None:
    cluster.decode.hold_after = 3
    task = asyncio.create_task(post(http))
    await until(lambda: any(r.sent for r in cluster.decode.requests.values()))
    port = int(cluster.decode.address.rpartition(":")[2])
    await cluster.decode.die()
    reborn = await cluster.add_decode("decode-0", port)
    status, body = await asyncio.wait_for(task, 60)
    assert (status, body["choices"][0]["text"]) == (200, ANSWER)
    await until(lambda: reborn.num_streams > 0)
    assert (await post(http))[0] == 200
    assert reborn.seen


async def test_workers_of_different_layouts_are_never_paired(start_router: StartRouter) -> None:
    cluster = await start_router()
    await cluster.add_prefill()
    cluster.prefill.layout = "other"
    await cluster.prefill.close()
    await cluster.prefill.start(cluster.control)
    await cluster.add_decode()
    async with aiohttp.ClientSession(cluster.url) as http:
        status, body = await post(http)
    assert status == 503
    assert "layout other" in body["error"]["message"]


async def test_drain_finishes_what_was_admitted(http, cluster: Cluster) -> None:
    cluster.decode.step_s = 0.02
    task = asyncio.create_task(post(http))
    await until(lambda: len(cluster.prefill.seen) == 1)
    drain = asyncio.create_task(cluster.service.drain())
    await asyncio.sleep(0.01)
    status, body = await post(http)
    assert (status, body["error"]["code"]) == (503, "server_is_draining")
    async with http.get("/ready") as response:
        assert response.status == 503
    status, body = await task
    assert (status, body["choices"][0]["text"]) == (200, ANSWER)
    await asyncio.wait_for(drain, 60)


async def test_many_streams_with_random_cancels_leave_nothing(http, cluster: Cluster) -> None:
    async def one(number: int) -> None:
        body = {**BODY, "stream": True, "max_tokens": 20 + number % 40}
        async with http.post("/v1/completions", json=body) as response:
            num_lines = 0
            async for _ in response.content:
                num_lines += 1
                if number % 3 == 0 and num_lines > number % 17:
                    return
            assert num_lines > 2

    await asyncio.gather(*(one(number) for number in range(100)))
    await until(lambda: not cluster.decode.requests)
    async with asyncio.timeout(60):  # decode is told before the router is through
        while await num_in_flight(http):
            await asyncio.sleep(0.01)


async def num_in_flight(http: aiohttp.ClientSession) -> int:
    async with http.get("/status") as response:
        status = await response.json()
    of_workers = sum(worker["num_requests_in_flight"] for worker in status["workers"])
    return int(status["num_requests_in_flight"] + of_workers)
