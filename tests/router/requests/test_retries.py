"""What the pair is at fault for is tried elsewhere, and the client has the same text."""

from __future__ import annotations

import asyncio

import aiohttp
import orjson
import pytest

from router.requests import attempt as attempt_module
from runtime.errors import (
    DrainingError,
    OutOfBlocksError,
    OverloadedError,
    PeerLostError,
    StaleTicketError,
    TransferFailedError,
)
from tests.router.conftest import ANSWER, MODEL, Cluster, StartRouter
from tests.waiting import until
from worker.endings import RankName, failure_of_requests
from worker.watchdog import StepOverdueError

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 100}
LOST = TransferFailedError("the KV was lost")


async def stream(http: aiohttp.ClientSession) -> tuple[str, dict | None]:
    """The text of a streamed completion and its error, if any."""
    text, error = "", None
    async with http.post("/v1/completions", json={**BODY, "stream": True}) as response:
        if response.status != 200:
            return "", (await response.json())["error"]
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = orjson.loads(line[6:])
                error = event.get("error", error)
                text += "".join(choice["text"] for choice in event.get("choices", []))
    return text, error


@pytest.mark.parametrize("error", [LOST, StaleTicketError("fenced"), PeerLostError("connection")])
async def test_another_pair_continues_the_stream(http, cluster: Cluster, error) -> None:
    second = await cluster.add_prefill("prefill-1")
    other_decode = await cluster.add_decode("decode-1")
    await until(lambda: other_decode.num_streams > 0)
    cluster.prefill.transfer_error = error
    for _ in range(4):
        assert await stream(http) == (ANSWER, None)
    assert cluster.prefill.num_transfers > 0
    failed = {request.request_id for request in cluster.prefill.seen}
    retried = {request.request_id for request in second.seen}
    assert {f"{request_id}-r1" for request_id in failed} <= retried
    await until(lambda: not cluster.decode.requests and not other_decode.requests)


async def test_the_only_pair_tries_again_and_then_answers(start_router: StartRouter) -> None:
    cluster = await start_router(max_migrations=2)
    prefill = await cluster.add_prefill()
    decode = await cluster.add_decode()
    prefill.transfer_error = LOST
    async with aiohttp.ClientSession(cluster.url) as http:
        text, error = await stream(http)
    assert text == cluster.text_of(3)  # each try had a token from prefill
    assert error is not None
    assert (error["code"], error["message"]) == ("kv_transfer_failed", LOST.message)
    assert prefill.num_transfers == 3
    await until(lambda: decode.requests == {})


async def test_a_passing_failure_costs_nothing_but_time(http, cluster: Cluster) -> None:
    cluster.prefill.transfer_error = LOST
    cluster.prefill.num_failing = 1
    assert await stream(http) == (ANSWER, None)
    assert cluster.prefill.num_transfers == 2


async def test_decode_fails_while_prefill_computes(http, cluster: Cluster) -> None:
    """Both legs are watched: prefill is told to stop, and the client has decode's reason."""
    cluster.prefill.run_s = 30
    task = asyncio.create_task(stream(http))
    await until(lambda: cluster.prefill.num_computed == 1)
    request_id = cluster.decode.fail(OutOfBlocksError("evicted"))
    async with http.post("/v1/completions", json=BODY | {"model": "none"}):
        pass  # the router goes on serving
    _, error = await asyncio.wait_for(task, 60)
    assert error is not None
    assert error["code"] == "out_of_kv_blocks"
    await until(lambda: cluster.prefill.cancelled == [request_id])


@pytest.mark.parametrize("error", [LOST, PeerLostError("prefill-0 cannot go on")])
async def test_a_ticket_that_failed_is_not_decode_s_fault(http, cluster: Cluster, error) -> None:
    """Its frames may say so before prefill does: the only decode worker is tried again."""
    cluster.prefill.run_s = 30
    task = asyncio.create_task(stream(http))
    await until(lambda: cluster.prefill.num_computed == 1)
    other = await cluster.add_prefill("prefill-1")
    request_id = cluster.decode.fail(error)
    assert await asyncio.wait_for(task, 60) == (ANSWER, None)
    assert [request.request_id for request in other.seen] == [f"{request_id}-r1"]


@pytest.mark.parametrize("error", [PeerLostError("decode-0 cannot go on"), DrainingError("ended")])
async def test_a_reservation_in_a_broken_group_is_made_in_another(
    http, cluster: Cluster, error
) -> None:
    other = await cluster.add_decode("decode-1")
    await until(lambda: other.num_streams > 0)
    cluster.decode.reserve_error = error
    for _ in range(4):
        assert await stream(http) == (ANSWER, None)
    refused = {request.request_id for request in cluster.decode.seen}
    assert refused
    assert {f"{request_id}-r1" for request_id in refused} <= {r.request_id for r in other.seen}


@pytest.mark.parametrize("error", [OverloadedError("full"), DrainingError("ended")])
async def test_what_decode_answers_to_a_claim_is_no_fault_of_prefill(
    http, cluster: Cluster, error
) -> None:
    """The prefill worker passes it on, is not avoided, and is used again."""
    await cluster.add_prefill("prefill-1")
    other = await cluster.add_decode("decode-1")
    await until(lambda: other.num_streams > 0)
    cluster.decode.claim_error = error
    for _ in range(4):
        assert await stream(http) == (ANSWER, None)
    assert cluster.decode.seen
    for request in cluster.decode.seen:
        asked = [
            prefill.instance
            for prefill in cluster.prefills
            for call in prefill.seen
            if call.request_id.removesuffix("-r1") == request.request_id
        ]
        assert len(asked) == 2
        assert len(set(asked)) == 1


@pytest.mark.parametrize("error", [OverloadedError("full"), DrainingError("ended")])
async def test_what_prefill_tells_decode_is_no_fault_of_decode(
    http, cluster: Cluster, error
) -> None:
    cluster.prefill.run_s = 30
    task = asyncio.create_task(stream(http))
    await until(lambda: cluster.prefill.num_computed == 1)
    other = await cluster.add_prefill("prefill-1")
    error.relayed_from = "prefill-0/0"
    request_id = cluster.decode.fail(error)
    assert await asyncio.wait_for(task, 60) == (ANSWER, None)
    assert [request.request_id for request in other.seen] == [f"{request_id}-r1"]
    assert len(cluster.decode.seen) == 2


@pytest.mark.parametrize("kind", ["hangs", "loses a rank", "is stopped"])
async def test_a_prompt_of_a_prefill_group_that_ends_goes_to_another(
    http, cluster: Cluster, kind: str
) -> None:
    causes = {"hangs": StepOverdueError("a step"), "loses a rank": PeerLostError("rank 0")}
    name = RankName(instance="prefill-0", rank=1, num_ranks=2)
    other = await cluster.add_prefill("prefill-1")
    # As the rank itself would say it.
    cluster.prefill.run_error = failure_of_requests(name, causes.get(kind), in_step=True)
    for _ in range(4):
        assert await stream(http) == (ANSWER, None)
    failed = {request.request_id for request in cluster.prefill.seen}
    assert failed
    assert {f"{request_id}-r1" for request_id in failed} <= {r.request_id for r in other.seen}


@pytest.mark.parametrize("num_tokens", [1, 3])
async def test_a_lost_group_costs_no_request(http, cluster: Cluster, num_tokens: int) -> None:
    other = await cluster.add_decode("decode-1")
    await until(lambda: other.num_streams > 0)
    lost = PeerLostError("decode-0 rank 0 of 2 cannot go on")
    cluster.decode.fail_error, cluster.decode.fail_after = lost, num_tokens
    assert [await stream(http) for _ in range(4)] == [(ANSWER, None)] * 4
    assert cluster.decode.seen


async def test_a_decode_that_does_not_answer_is_left(
    http, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "RESERVE_TIMEOUT_S", 0.3)
    cluster.decode.reserve_s = 60.0
    task = asyncio.create_task(stream(http))
    await until(lambda: len(cluster.decode.seen) == 1)
    other = await cluster.add_decode("decode-1")
    assert await asyncio.wait_for(task, 60) == (ANSWER, None)
    assert len(other.seen) == 1
