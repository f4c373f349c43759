"""What one tenant may cost the others, over HTTP: whatever costs something is limited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from router.http.access.gate import Gate
from router.keys.file import add_to_file
from router.keys.ledger import KeyLedger
from router.keys.record import LEAST_OUTPUT, KeyLimits, KeyRecord, hash_key, new_key
from tests.router.conftest import MODEL, Cluster, StartRouter
from tests.waiting import until

MESSAGES = [{"role": "user", "content": "hi"}]
COUNTING: dict[str, dict[str, object]] = {
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [40]},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses/input_tokens": {"input": "hi"},
}
Http = aiohttp.ClientSession
Start = Callable[..., Awaitable[tuple[Cluster, Http]]]


@pytest.fixture
async def start(start_router: StartRouter, tmp_path: Path) -> AsyncIterator[Start]:
    """A cluster whose one key, alice, has these limits, and her session."""
    async with AsyncExitStack() as stack:

        async def start(**limits: int) -> tuple[Cluster, Http]:
            key, path = new_key(), tmp_path / "keys.toml"
            record = KeyRecord(name="alice", sha256=hash_key(key), limits=KeyLimits(**limits))
            add_to_file(path, record)
            cluster = await start_router(keys_file=str(path))
            await cluster.add_pair()
            headers = {"x-api-key": key}
            return cluster, await stack.enter_async_context(Http(cluster.url, headers=headers))

        yield start


def gate_of(cluster: Cluster) -> Gate:
    assert cluster.service._http is not None
    return cluster.service._http._gate


def ledger_of(cluster: Cluster) -> KeyLedger:
    ledger = gate_of(cluster)._ledger
    assert isinstance(ledger, KeyLedger)
    return ledger


@pytest.mark.parametrize("path", COUNTING)
async def test_whatever_counts_tokens_is_a_request_of_its_key(start: Start, path: str) -> None:
    cluster, http = await start(requests_per_minute=3, tokens_per_minute=1)
    told = []
    for _ in range(5):
        async with http.post(path, json=COUNTING[path]) as response:
            told.append((response.status, response.headers["x-ratelimit-remaining-requests"]))
            retry_after = response.headers.get("retry-after")
    # No token of it is charged: the one of the minute is left.
    assert told == [(200, "2"), (200, "1"), (200, "0"), (429, "0"), (429, "0")]
    assert retry_after is not None
    assert ledger_of(cluster).num_running("alice") == 0
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
    async with http.post("/v1/completions", json=body) as response:
        assert response.status == 429  # they have used up what requests have, too


async def test_a_stream_is_charged_while_it_runs(start: Start) -> None:
    cluster, http = await start(tokens_per_minute=100_000)
    cluster.decode.step_s = 0.01
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, "ignore_eos": True, "n": 2}
    levels: list[int] = []

    async def level() -> int:
        async with http.post("/tokenize", json={"prompt": "x"}) as response:
            return int(response.headers["x-ratelimit-remaining-tokens"])

    gate = gate_of(cluster)
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        (use,) = gate._running
        taken = use.num_taken
        # Of its length nothing is said: each choice is taken for what is usual.
        assert 2 * LEAST_OUTPUT <= taken <= 2 * LEAST_OUTPUT + 100
        use.num_taken = 20  # as if it had been taken for next to nothing
        while not response.content.at_eof():
            await response.content.readline()
            gate.tick()
            if use in gate._running:
                levels.append(use.num_taken)
                assert use.num_taken == max(20, use.num_tokens)
    assert levels == sorted(levels)
    assert levels[-1] > 100
    await until(lambda: not ledger_of(cluster).num_running("alice"))
    assert await level() > 100_000 - 2 * 256 - 600


async def test_where_tokens_alone_are_limited_so_are_requests_at_once(start: Start) -> None:
    cluster, http = await start(tokens_per_minute=2 * LEAST_OUTPUT)
    cluster.prefill.holds_runs = True
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    running = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
    await until(lambda: len(cluster.prefill.seen) == 2)
    async with http.post("/v1/completions", json=body) as response:
        assert response.status == 429
        message = (await response.json())["error"]["message"]
    assert f"may have 2 requests at once (tokens_per_minute / {LEAST_OUTPUT})" in message
    for task in running:
        task.cancel()
    await until(lambda: not ledger_of(cluster).num_running("alice"))


async def test_seconds_of_cpu_cost_requests_and_are_counted_by_key(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, http = await start(requests_per_minute=1000)
    monkeypatch.setattr("router.http.access.gate.CPU_S_OF_REQUEST", 1e-6)  # of the quickest machine

    async def left() -> int:
        async with http.post("/tokenize", json={"prompt": "x"}) as response:
            return int(response.headers["x-ratelimit-remaining-requests"])

    before = await left()
    async with http.post("/tokenize", json={"prompt": "fox " * 5000}) as response:
        assert response.status in (200, 400)
    assert await left() < before - 3
    gate_of(cluster).tick()
    assert await cpu_s_of_alice(http) > 0


async def test_masks_that_workers_make_are_charged(start: Start) -> None:
    cluster, http = await start(requests_per_minute=1000)
    cluster.prefill.mask_cpu_s = 100.0
    body = {"model": MODEL, "prompt": "x", "max_tokens": 3}
    left: list[int] = []
    for _ in range(2):
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 200
            left.append(int(response.headers["x-ratelimit-remaining-requests"]))
    assert left[1] < left[0] - 80  # one second is in a request's price, and some come back
    gate_of(cluster).tick()
    assert await cpu_s_of_alice(http) > 199


async def cpu_s_of_alice(http: Http) -> float:
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    name = 'pd_router_key_cpu_seconds_total{key="alice"} '
    (value,) = [line.removeprefix(name) for line in lines if line.startswith(name)]
    return float(value)
