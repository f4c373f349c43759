"""A request that loses its decode worker is one trace, in which every attempt has its span."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
    RouterSection,
    TracingSection,
)
from runtime.trace.context import TraceContext
from tests.integration.client import Completion, stream
from tests.integration.cluster import Cluster
from tests.integration.collector import Collector, attributes_of
from tests.integration.conftest import MODEL_DIR
from tests.integration.test_drain import drain, in_thread
from tests.waiting import wait_until

pytest.importorskip("opentelemetry.sdk", reason='pip install -e ".[tracing]"')
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
PROMPT = list(range(300, 400))
NUM_TOKENS = 256
NUM_BEFORE = 8
"""Events at least that the client has when its worker goes; 40 ms a step leave 10 s to find it."""
ROOT = "text_completion tandem-python"
Lose = Callable[[Cluster, str], Awaitable[None]]


@pytest.fixture(scope="module")
def cluster(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR), name="tandem-python"),
        router=RouterSection(worker_wait_s=120.0, lease_ttl_s=5.0),
        prefill=PrefillSection(num_blocks=64),
        decode=DecodeSection(instances=2, num_blocks=64),
        kv_transfer=KVTransferSection(transport="loopback"),
        tracing=TracingSection(endpoint=collector.endpoint, sample_ratio=0.0),
    )
    modules = {"decode": "tests.integration.slow_decode"}
    folder: Path = tmp_path_factory.mktemp("moved")
    with Cluster(config, folder, modules=modules) as cluster:
        yield cluster


def serving(cluster: Cluster) -> str:
    """The decode instance that has the one request there is; empty: none yet."""
    names = ("decode-0", "decode-1")
    return next((one for one in names if cluster.metric(one, "pd_decode_num_requests")), "")


async def ask_and_lose(cluster: Cluster, client: TraceContext, lose: Lose) -> tuple[str, list[int]]:
    """A stream whose decode worker is lost when it has begun: the worker, and all tokens."""
    seen = 0

    def count() -> None:
        nonlocal seen
        seen += 1

    async def ask() -> Completion:
        headers = {"traceparent": client.header}
        timeout = aiohttp.ClientTimeout(total=240)
        async with aiohttp.ClientSession(
            cluster.base_url, headers=headers, timeout=timeout
        ) as http:
            options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
            return await stream(
                http, PROMPT, model="tandem-python", temperature=0, on_event=count, **options
            )

    async with asyncio.timeout(300):
        task = asyncio.create_task(ask())
        while seen < NUM_BEFORE or not (victim := await asyncio.to_thread(serving, cluster)):
            assert not task.done(), f"over before its worker was lost: {task.result()}"
            await asyncio.sleep(0.01)
        await lose(cluster, victim)
        answer = await task
    assert answer.error is None
    return victim, answer.token_ids


def spans_of(collector: Collector, client: TraceContext, name: str) -> list[Any]:
    """All of a name, in the order of their beginnings."""
    found = [span for _, span in collector.of(client.trace_id) if span.name == name]
    return sorted(found, key=lambda span: span.start_time_unix_nano)


def check_trace(collector: Collector, client: TraceContext, victim: str, survivor: str) -> None:
    """One root; both attempts below it, told apart by who served them and why the first ended."""
    wait_until(lambda: bool(spans_of(collector, client, ROOT)), "the router's spans")
    (root,) = spans_of(collector, client, ROOT)
    told = attributes_of(root)
    assert told["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert told["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert not root.status.code, "the client noticed nothing"

    first, second = spans_of(collector, client, "router.attempt")
    before, after = attributes_of(first), attributes_of(second)
    for span in (first, second):
        assert span.parent_span_id == root.span_id
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    assert first.end_time_unix_nano <= second.start_time_unix_nano
    assert [before["tandem.attempt"], after["tandem.attempt"]] == [0, 1]
    assert [before["tandem.decode"], after["tandem.decode"]] == [f"{victim}/0", f"{survivor}/0"]
    assert 0 < before["gen_ai.usage.output_tokens"] < NUM_TOKENS
    given = before["gen_ai.usage.output_tokens"] + after["gen_ai.usage.output_tokens"]
    assert given == NUM_TOKENS
    assert not second.status.code

    # What prefill computed anew is the prompt and all that the client had.
    wait_until(lambda: len(spans_of(collector, client, "prefill")) == 2, "prefill's spans")
    prefills = [attributes_of(span) for span in spans_of(collector, client, "prefill")]
    ids = [before["tandem.request_id"], after["tandem.request_id"]]
    assert [told["tandem.request_id"] for told in prefills] == ids
    contexts = [told["gen_ai.usage.input_tokens"] for told in prefills]
    assert contexts == [len(PROMPT), len(PROMPT) + before["gen_ai.usage.output_tokens"]]
    assert all(
        span.parent_span_id == root.span_id
        for name in ("prefill", "decode")
        for span in spans_of(collector, client, name)
    )
    # Prefill, and the first token, were the first decode worker's time.
    (span,) = spans_of(collector, client, "router.prefill")
    assert attributes_of(span)["tandem.decode"] == f"{victim}/0"
    (span,) = spans_of(collector, client, "router.decode")
    assert attributes_of(span)["tandem.decode"] == f"{survivor}/0"
    assert attributes_of(span)["tandem.num_migrations"] == 1


def other_than(victim: str) -> str:
    (other,) = {"decode-0", "decode-1"} - {victim}
    return other


async def test_a_drained_decode_worker_leaves_both_attempts_in_one_trace(
    cluster: Cluster, collector: Collector
) -> None:
    client = TraceContext.begin(1.0)

    async def lose(cluster: Cluster, victim: str) -> None:
        await drain(cluster, victim, 0.1)

    victim, tokens = await ask_and_lose(cluster, client, lose)
    assert len(tokens) == NUM_TOKENS
    await asyncio.to_thread(check_trace, collector, client, victim, other_than(victim))
    (first, _) = spans_of(collector, client, "router.attempt")
    assert first.status.message == "draining"
    wait_until(lambda: len(spans_of(collector, client, "decode")) == 2, "decode's spans")
    left, took = spans_of(collector, client, "decode")
    (attempt, last) = spans_of(collector, client, "router.attempt")
    for span, of_router in ((left, attempt), (took, last)):
        id_name = "tandem.request_id"
        assert attributes_of(span)[id_name] == attributes_of(of_router)[id_name]
    assert not took.status.code
    # A drained worker stays out: the next test needs both.
    await in_thread(cluster.terminate, victim)
    await in_thread(cluster.start_instance, "decode", int(victim[-1]))
    await in_thread(cluster.wait_workers, 3)


async def test_a_killed_decode_worker_says_nothing_and_its_attempt_is_in_the_trace(
    cluster: Cluster, collector: Collector
) -> None:
    client = TraceContext.begin(1.0)

    async def lose(cluster: Cluster, victim: str) -> None:
        await asyncio.to_thread(cluster.kill, f"{victim}/0")

    victim, tokens = await ask_and_lose(cluster, client, lose)
    assert len(tokens) == NUM_TOKENS
    await asyncio.to_thread(check_trace, collector, client, victim, other_than(victim))
    (first, _) = spans_of(collector, client, "router.attempt")
    assert first.status.message == "peer_lost"
    wait_until(lambda: bool(spans_of(collector, client, "decode")), "decode's spans")
    (only,) = spans_of(collector, client, "decode")
    assert attributes_of(only)["gen_ai.response.finish_reasons"]
