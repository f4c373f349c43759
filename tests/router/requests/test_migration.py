"""Workers fail after any number of tokens: the answer is that of an undisturbed request."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref

import aiohttp
import orjson
import pytest

from router.requests.attempt import Attempt
from runtime.errors import (
    DrainingError,
    InternalError,
    PeerLostError,
    StaleTicketError,
    TransferFailedError,
)
from tests.router.conftest import ANSWER, MODEL, Cluster, StartRouter
from tests.router.fakes import FakeDecode
from tests.router.outputs import seeded_token
from tests.waiting import until

LONG = " ".join([ANSWER] * 3)
BODY = {"model": MODEL, "prompt": "x", "max_tokens": 100}


async def post(http: aiohttp.ClientSession, **change: object) -> tuple[int, dict]:
    async with http.post("/v1/completions", json={**BODY, **change}) as response:
        return response.status, await response.json()


async def answer_of(http: aiohttp.ClientSession, **change: object) -> dict:
    """The choices and usage of a request that has to succeed."""
    status, body = await post(http, **change)
    assert status == 200, body
    return {key: body[key] for key in ("choices", "usage")}


async def metric(http: aiohttp.ClientSession, name: str) -> float:
    async with http.get("/metrics") as response:
        text = await response.text()
    values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for value in values)


async def add_second(cluster: Cluster) -> FakeDecode:
    """A second decode rank that is ready to take over."""
    other = await cluster.add_decode("decode-1")
    await until(lambda: other.num_streams > 0)
    return other


@pytest.fixture
async def cluster(cluster: Cluster) -> Cluster:
    """Of answers that are long enough."""
    cluster.answer = LONG
    return cluster


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
async def test_decode_dies_after_some_tokens(http, cluster: Cluster, num_tokens: int) -> None:
    expected = await answer_of(http)
    cluster.decode.die_after = num_tokens
    task = asyncio.create_task(answer_of(http))
    await until(lambda: len(cluster.decode.seen) == 2)
    other = await cluster.add_decode("decode-1")
    assert await asyncio.wait_for(task, 60) == expected
    (reserved,) = other.seen
    assert reserved.num_output_tokens == num_tokens
    assert (
        list(reserved.context_token_ids)
        == list(cluster.decode.seen[1].context_token_ids) + (cluster.script([])[:num_tokens])
    )
    assert cluster.prefill.seen[-1].context_token_ids == reserved.context_token_ids


async def test_an_attempt_that_failed_is_freed_without_a_collection(
    http, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[weakref.ref[Attempt]] = []
    run = Attempt.run

    async def noted(attempt: Attempt) -> None:
        attempts.append(weakref.ref(attempt))
        await run(attempt)

    monkeypatch.setattr(Attempt, "run", noted)
    cluster.decode.die_after = 3
    gc.disable()
    try:
        task = asyncio.create_task(answer_of(http))
        await until(lambda: len(cluster.decode.seen) == 1)
        await cluster.add_decode("decode-1")
        await asyncio.wait_for(task, 60)
        await until(lambda: len(attempts) > 1 and not any(each() for each in attempts))
    finally:
        gc.enable()


async def test_decode_dies_before_the_first_token(http, cluster: Cluster) -> None:
    expected = await answer_of(http)
    cluster.prefill.holds_runs = True
    task = asyncio.create_task(answer_of(http))
    await until(lambda: cluster.prefill.num_computed == 2)
    await cluster.decode.die()
    await until(lambda: len(cluster.prefill.cancelled) == 1)
    cluster.prefill.go_on.set()
    other = await cluster.add_decode("decode-1")
    assert await asyncio.wait_for(task, 60) == expected
    assert [request.num_output_tokens for request in other.seen] == [0]


async def test_the_stream_of_events_goes_on_without_a_gap(http, cluster: Cluster) -> None:
    await add_second(cluster)
    third = await cluster.add_decode("decode-2")
    await until(lambda: third.num_streams > 0)
    for decode, num_tokens in zip(cluster.decodes, (5, 5, 9), strict=True):
        decode.fail_error, decode.fail_after = PeerLostError("gone"), num_tokens
    texts: list[str] = []
    async with http.post("/v1/completions", json={**BODY, "stream": True}) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = orjson.loads(line[6:])
                assert "error" not in event, event
                texts += [choice["text"] for choice in event["choices"]]
    assert "".join(texts) == LONG


async def test_prefill_dies_before_the_kv_is_over(http, cluster: Cluster) -> None:
    """The client has the first token, and decode waits for KV that never comes."""
    expected = await answer_of(http)
    cluster.prefill.holds_transfers = True
    task = asyncio.create_task(answer_of(http))
    await until(lambda: cluster.prefill.num_transfers == 2)
    await cluster.add_prefill("prefill-1")
    await cluster.prefill.die()
    cluster.decode.fail(TransferFailedError("prefill-0 is lost"))  # it has fenced
    assert await asyncio.wait_for(task, 60) == expected
    assert [r.num_output_tokens for r in cluster.prefills[1].seen] == [1]


async def test_the_prefill_that_has_the_kv_is_preferred(http, cluster: Cluster) -> None:
    """It has only the output to compute; another one would begin with the prompt."""
    await add_second(cluster)
    prefills = [cluster.prefill, await cluster.add_prefill("prefill-1")]
    for decode in cluster.decodes:
        decode.fail_error, decode.fail_after = PeerLostError("gone"), 3
    async with http.post("/v1/completions", json=BODY) as response:
        await response.read()
    for prefill in prefills:
        names = {request.request_id.partition("-r1")[0] for request in prefill.seen}
        assert len(names) in (0, 1)
    assert sorted(len(prefill.seen) for prefill in prefills) in ([0, 2], [0, 3])


async def test_a_drained_decode_gives_its_requests_away(http, cluster: Cluster) -> None:
    expected = await answer_of(http)
    cluster.decode.hold_after = 6
    task = asyncio.create_task(answer_of(http))
    await until(lambda: any(len(r.sent) == 5 for r in cluster.decode.requests.values()))
    await add_second(cluster)
    cluster.decode.drain(DrainingError("decode-0 was told to stop"))
    assert await asyncio.wait_for(task, 60) == expected
    assert await metric(http, "pd_router_migrations_total") == 1


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
async def test_choices_seeds_and_logprobs_are_those_of_an_undisturbed_answer(
    http, cluster: Cluster, num_tokens: int
) -> None:
    change = {"n": 4, "seed": 7, "logprobs": 2, "max_tokens": 30, "return_token_ids": True}
    other = await add_second(cluster)
    for worker in (cluster.prefill, *cluster.decodes):
        worker.choose = seeded_token
    expected = await answer_of(http, **change)
    texts = [choice["text"] for choice in expected["choices"]]
    assert len(set(texts)) == 4
    lost = PeerLostError("decode-0 rank 0 of 2 cannot go on")
    cluster.decode.fail_error, cluster.decode.fail_after = lost, num_tokens
    assert await answer_of(http, **change) == expected
    assert await metric(http, "pd_router_migrations_total") > 0
    assert other.seen


async def test_a_stop_string_is_found_across_the_move(http, cluster: Cluster) -> None:
    stop = "w\u00f6rld \U0001f642 and"
    expected = await answer_of(http, stop=stop)
    assert expected["choices"][0]["finish_reason"] == "stop"
    ids = cluster.tokenizer.encode(ANSWER.partition(stop)[0], add_special_tokens=False)
    await add_second(cluster)
    for num_tokens in range(len(ids) + 1, len(ids) + 4):  # within the stop string
        cluster.decode.fail_error, cluster.decode.fail_after = PeerLostError("gone"), num_tokens
        for _ in range(2):
            assert await answer_of(http, stop=stop) == expected
    await until(lambda: not any(decode.requests for decode in cluster.decodes))


async def test_prompt_logprobs_are_asked_for_once(http, cluster: Cluster) -> None:
    await add_second(cluster)
    change = {"echo": True, "logprobs": 1, "max_tokens": 8}
    expected = await answer_of(http, **change)
    for decode in cluster.decodes:
        decode.fail_error, decode.fail_after = PeerLostError("gone"), 3
    assert await answer_of(http, **change) == expected
    moved = [request for request in cluster.prefill.seen if request.num_output_tokens]
    assert moved
    assert {request.sampling.num_prompt_logprobs for request in moved} == {-1}


async def test_moves_are_bounded_counted_and_told(start_router: StartRouter) -> None:
    cluster = await start_router(max_migrations=3)
    await cluster.add_prefill()
    decode = await cluster.add_decode()
    # Its own words: no worker is lost, so the only one is tried again.
    decode.fail_error = StaleTicketError("fenced")
    cluster.prefill.transfer_error = StaleTicketError("fenced")
    cluster.prefill.num_failing = 2
    headers = {"x-tandem-timings": "1"}
    async with aiohttp.ClientSession(cluster.url) as http:
        async with http.post("/v1/completions", json=BODY, headers=headers) as response:
            body = await response.json()
            timings = orjson.loads(response.headers["x-tandem-timings"])
        assert body["choices"][0]["text"] == ANSWER
        assert timings["num_migrations"] == 2
        assert 0 < timings["migration_s"] < timings["total_s"]
        assert await metric(http, "pd_router_migrations_total") == 2
        assert await metric(http, "pd_router_migration_seconds_count") == 2
        cluster.prefill.num_failing = 1 << 30
        cluster.prefill.num_transfers = 0
        status, body = await post(http)
        assert (status, body["error"]["code"]) == (502, "worker_restarted")
        assert cluster.prefill.num_transfers == 4


async def test_what_a_worker_that_ended_by_its_own_fault_had_moves_once(
    http, cluster: Cluster
) -> None:
    """Any of its requests may have been the cause: a second worker may fall to it, not a third."""
    expected = await answer_of(http)
    ended = InternalError("decode-0 rank 0 of 1 failed: bug", suspect=True)
    other = await add_second(cluster)
    third = await cluster.add_decode("decode-2")
    await until(lambda: third.num_streams > 0)
    cluster.decode.fail_error, cluster.decode.fail_after = ended, 3
    for _ in range(3):
        assert await answer_of(http) == expected
    for decode in (cluster.decode, other, third):
        decode.seen.clear()
        decode.fail_error, decode.fails_always = ended, True
    status, body = await post(http)
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert sum(len(decode.seen) for decode in cluster.decodes) == 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_waits_for_the_only_worker_to_come_back(
    start_router: StartRouter, role: str
) -> None:
    cluster = await start_router(worker_wait_s=30.0)
    prefill = await cluster.add_prefill()
    decode = await cluster.add_decode()
    await until(lambda: decode.num_streams > 0)
    async with aiohttp.ClientSession(cluster.url) as http:
        expected = await answer_of(http)
        victim = prefill if role == "prefill" else decode
        decode.hold_after, prefill.holds_runs = 3, role == "prefill"
        task = asyncio.create_task(answer_of(http))
        await until(lambda: len(prefill.seen) == 2)
        decode.hold_after = 0 if role == "prefill" else 3
        await victim.die()
        await asyncio.sleep(1.0)
        assert not task.done()
        if role == "prefill":
            await cluster.add_prefill("prefill-0", victim.port)
        else:
            await cluster.add_decode("decode-0", victim.port)
        assert await asyncio.wait_for(task, 60) == expected


async def test_a_new_request_waits_where_workers_were_there_before(
    start_router: StartRouter,
) -> None:
    cluster = await start_router(worker_wait_s=30.0)
    async with aiohttp.ClientSession(cluster.url) as http:
        # Never ready: nothing says that somebody will come.
        status, body = await asyncio.wait_for(post(http), 60)
        assert (status, body["error"]["code"]) == (503, "server_not_ready")
        await cluster.add_prefill()
        decode = await cluster.add_decode()
        assert (await post(http))[0] == 200
        await decode.close()
        task = asyncio.create_task(post(http))
        await asyncio.sleep(0.3)
        assert not task.done()
        await cluster.add_decode("decode-1")
        assert (await asyncio.wait_for(task, 60))[0] == 200


async def test_the_first_failure_is_told_where_nobody_comes(http, cluster: Cluster) -> None:
    cluster.decode.fail_error, cluster.decode.fail_after = PeerLostError("gone"), 3
    status, body = await post(http)
    assert (status, body["error"]["message"]) == (502, "gone")


async def test_an_output_that_is_whole_is_ended_and_not_moved(http, cluster: Cluster) -> None:
    """Only the word of the end was lost: at max_tokens nothing can follow."""
    expected = await answer_of(http, max_tokens=4)
    cluster.decode.fail_error, cluster.decode.loses_finish = PeerLostError("gone"), True
    task = asyncio.create_task(answer_of(http, max_tokens=4))
    await until(lambda: len(cluster.decode.seen) == 2)
    assert await asyncio.wait_for(task, 60) == expected
    assert len(cluster.decode.seen) == 2
