"""One request through three processes is one trace, at a collector that speaks OTLP over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import aiohttp
import pytest

from runtime.config import ClusterConfig, ModelSection, TracingSection
from runtime.trace.context import TraceContext
from tests.integration.cluster import Cluster
from tests.integration.collector import Collector, attributes_of
from tests.integration.conftest import MODEL_DIR
from tests.waiting import wait_until

pytest.importorskip("opentelemetry.sdk", reason='pip install -e ".[tracing]"')
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
JITTER_NS = 2_000_000
"""Of a process's reading of two clocks, one after the other, on one machine."""


@pytest.fixture(scope="module")
def cluster(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        tracing=TracingSection(endpoint=collector.endpoint, sample_ratio=0.0),
    )
    with Cluster(config, tmp_path_factory.mktemp("tracing")) as cluster:
        yield cluster


async def ask(cluster: Cluster, headers: dict[str, str]) -> None:
    body = {
        "model": "tandem-python",
        "prompt": list(range(300, 500)),
        "max_tokens": 24,
        "ignore_eos": True,
        "temperature": 0,
    }
    async with (
        aiohttp.ClientSession(cluster.base_url) as http,
        http.post("/v1/completions", json=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()


async def test_spans_of_all_roles_are_one_trace_and_lie_within_each_other(
    cluster: Cluster, collector: Collector
) -> None:
    client = TraceContext.begin(1.0)
    await ask(cluster, {"traceparent": client.header, "tracestate": "vendor=abc"})
    wanted = {"text_completion tandem-python", "prefill", "decode", "router.decode"}
    wait_until(
        lambda: wanted <= {span.name for _, span in collector.of(client.trace_id)},
        "the spans of all roles",
    )
    found = collector.of(client.trace_id)
    by_name = {span.name: span for _, span in found}
    assert {service for service, _ in found} == {"tandem-router", "tandem-prefill", "tandem-decode"}
    assert len(by_name) == len(found), "each once"
    root = by_name["text_completion tandem-python"]
    assert root.parent_span_id.hex() == client.span_id
    assert {span.trace_state for _, span in found} == {"vendor=abc"}
    parents = {
        **{f"router.{part}": root for part in ("queue", "reserve", "prefill", "decode")},
        **dict.fromkeys(("prefill", "decode"), root),
        **{f"prefill.{p}": by_name["prefill"] for p in ("queue", "compute", "kv_transfer")},
        **{
            f"decode.{part}": by_name["decode"]
            for part in ("reserved", "blocks", "kv", "admission", "steps")
        },
    }
    assert set(by_name) == {root.name, *parents}
    for name, parent in parents.items():
        span = by_name[name]
        assert span.parent_span_id == parent.span_id, name
        assert span.start_time_unix_nano <= span.end_time_unix_nano, name
        assert parent.start_time_unix_nano - JITTER_NS <= span.start_time_unix_nano, name
        assert span.end_time_unix_nano <= parent.end_time_unix_nano + JITTER_NS, name
    told = attributes_of(root)
    assert told["gen_ai.request.model"] == "tandem-python"
    assert told["gen_ai.operation.name"] == "text_completion"
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (200, 24)
    assert attributes_of(by_name["decode"])["gen_ai.usage.output_tokens"] == 24
    assert attributes_of(by_name["prefill.kv_transfer"])["tandem.num_bytes"] > 0


async def test_who_is_not_sampled_leaves_nothing(cluster: Cluster, collector: Collector) -> None:
    client = TraceContext.begin(0.0)
    before = len(collector.spans)
    await ask(cluster, {"traceparent": client.header})
    await ask(cluster, {})  # sample_ratio is 0
    sampled = TraceContext.begin(1.0)
    await ask(cluster, {"traceparent": sampled.header})
    wait_until(lambda: len(collector.of(sampled.trace_id)) >= 15, "the sampled one's spans")
    assert not collector.of(client.trace_id)
    assert len(collector.spans) - before == len(collector.of(sampled.trace_id))
