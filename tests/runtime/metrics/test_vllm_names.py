"""Names of vLLM: which role has which, that they say what ours say, and that scrapers get them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefill.messages import FirstTokenSampled, LoopLoad
from runtime.errors import OverloadedError
from runtime.metrics.core import render_metrics
from runtime.metrics.rows import HistogramRow
from runtime.metrics.vllm_names import PREFIX, ROWS, VllmNames
from tests.decode.cluster import run_cluster
from tests.runtime.exports import Exports, hold, make_exports

DOCUMENT = Path(__file__).parents[3] / "docs" / "use" / "metrics.md"
ROLES = ("prefill", "decode", "router")
PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
SUFFIXES = {"counter": "_total"}
Values = dict[str, float]


def scrape(exports: Exports, role: str) -> Values:
    """What one scrape of a role says under vLLM's names; labels but the common ones in braces."""
    text = render_metrics(exports.registries[role], VllmNames(role=role, model="m", rank=3))
    return values_of(text.decode(), {"model_name": "m", "engine": "3", "role": role})


def values_of(text: str, common: Mapping[str, str]) -> Values:
    values: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                assert sample.labels.items() >= common.items(), sample
                extra = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in common]
                name = sample.name.removeprefix(PREFIX)
                values[name + ("{" + ",".join(extra) + "}" if extra else "")] = sample.value
    return values


def first_token(num_cached_tokens: int) -> FirstTokenSampled:
    return FirstTokenSampled(
        nonce=1,
        token_id=2,
        index=0,
        logprobs=None,
        prompt_logprobs=(),
        finish_reason=None,
        num_cached_tokens=num_cached_tokens,
        queue_s=0.4,
        compute_s=0.9,
    )


def test_prefill_says_what_it_holds_and_what_it_computed() -> None:
    load = LoopLoad(
        num_waiting=5,
        num_claiming=2,
        num_running=3,
        num_sending=1,
        num_free_blocks=25,
        num_total_blocks=100,
    )
    exports = make_exports(load)
    exports.prefill.first_token(first_token(64), 200)
    exports.prefill.stepped(136, 0.9)
    values = scrape(exports, "prefill")
    assert values["num_requests_waiting"] == 7
    assert values["num_requests_waiting_by_reason{reason=capacity}"] == 5
    assert values["num_requests_waiting_by_reason{reason=deferred}"] == 2
    assert values["num_requests_running"] == 4
    assert values["kv_cache_usage_perc"] == 0.75
    assert values["cache_config_info{block_size=64,num_gpu_blocks=100}"] == 1
    assert values["prompt_tokens_total"] == values["prefix_cache_queries_total"] == 200
    assert values["prompt_tokens_cached_total"] == values["prefix_cache_hits_total"] == 64
    assert values["prompt_tokens_by_source_total{source=local_compute}"] == 136
    assert values["prompt_tokens_by_source_total{source=local_cache_hit}"] == 64
    assert values["generation_tokens_total"] == 1
    assert values["request_queue_time_seconds_bucket{le=0.3}"] == 0
    assert values["request_queue_time_seconds_bucket{le=0.5}"] == 1
    assert values["request_prefill_time_seconds_sum"] == 0.9
    assert values["iteration_tokens_total_bucket{le=128.0}"] == 0
    assert values["iteration_tokens_total_bucket{le=256.0}"] == 1


def test_a_request_that_failed_in_prefill_counts_in_no_total() -> None:
    exports = make_exports()
    exports.prefill.request_ended(OverloadedError("no room"))
    values = scrape(exports, "prefill")
    assert {name: value for name, value in values.items() if value and "info" not in name} == {}


def test_decode_says_what_it_holds_and_what_it_sampled() -> None:
    exports = make_exports()
    waiting = {"reserved": 4, "claimed": 1, "waiting_for_kv": 2, "waiting": 1, "preempted": 3}
    hold(exports.decode, free=10, total=40, running=6, **waiting)
    exports.decode.kv_arrived(0.2, 100, 64)
    exports.decode.scheduled(2, 1)
    exports.decode.stepped(6, 5, 0.02)
    exports.decode.decoded(1.2)
    values = scrape(exports, "decode")
    assert values["num_requests_waiting"] == 11
    assert values["num_requests_waiting_by_reason{reason=capacity}"] == 5
    assert values["num_requests_waiting_by_reason{reason=deferred}"] == 6
    assert values["num_requests_running"] == 6
    assert values["kv_cache_usage_perc"] == 0.75
    assert values["prompt_tokens_by_source_total{source=external_kv_transfer}"] == 36
    assert values["prompt_tokens_by_source_total{source=local_cache_hit}"] == 64
    assert values["generation_tokens_total"] == 5
    assert values["num_preemptions_total"] == 2
    assert values["request_decode_time_seconds_bucket{le=1.0}"] == 0
    assert values["request_decode_time_seconds_bucket{le=1.5}"] == 1


def test_the_router_counts_a_choice_once_when_it_ended_by_itself() -> None:
    exports = make_exports()
    split = {"router_s": 0.1, "prefill_queue_s": 0.5, "ttft_s": 2.0, "total_s": 6.0}
    exports.router.choice_finished("length", split, num_tokens=41, max_tokens=41)
    exports.router.count_error("worker_lost")
    exports.router.settle()  # as before every scrape
    values = scrape(exports, "router")
    assert values["request_success_total{finished_reason=length}"] == 1
    assert values["request_success_total{finished_reason=stop}"] == 0
    assert values["e2e_request_latency_seconds_sum"] == 6
    assert values["request_inference_time_seconds_sum"] == pytest.approx(5.4)
    assert values["request_time_per_output_token_seconds_sum"] == pytest.approx(0.1)
    assert values["request_generation_tokens_bucket{le=20.0}"] == 0
    assert values["request_generation_tokens_bucket{le=50.0}"] == 1
    assert values["request_params_max_tokens_count"] == 1


@pytest.mark.parametrize("role", ROLES)
def test_histograms_have_the_buckets_of_vllm(role: str) -> None:
    exports = make_exports()
    bounds: dict[str, set[float]] = {}
    for family in exports.registries[role].collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bounds.setdefault(family.name, set()).add(float(sample.labels["le"]))
    for row in ROWS[role]:
        if isinstance(row, HistogramRow):
            assert set(row.buckets) <= bounds[row.source], row.name
            values = scrape(exports, role)
            found = {name for name in values if name.startswith(f"{row.name}_bucket{{")}
            assert found == {f"{row.name}_bucket{{le={b}}}" for b in (*row.buckets, "+Inf")}


def test_the_document_says_which_role_has_which_name() -> None:
    documented = set()
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `vllm:"):
            names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            for name in re.findall(r"`vllm:(\w+)`", names):
                documented |= {
                    (name, role) for role, cell in zip(ROLES, cells, strict=True) if cell
                }
    exported = {
        (row.name + ("" if isinstance(row, HistogramRow) else SUFFIXES.get(row.kind, "")), role)
        for role in ROLES
        for row in ROWS[role]
    }
    assert documented == exported


def test_only_names_of_each_roles_own_share_are_in_several_roles() -> None:
    """Whoever sums over all processes must count nothing twice."""
    counts = Counter(row.name for rows in ROWS.values() for row in rows)
    assert {name for name, count in counts.items() if count > 1} == {
        "num_requests_waiting",
        "num_requests_running",
        "num_requests_waiting_by_reason",
        "kv_cache_usage_perc",
        "cache_config_info",
        "prompt_tokens_by_source",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "generation_tokens",
        "iteration_tokens_total",
    }


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3, "*/*"])
async def test_scrapers_of_every_version_get_the_names_with_their_colon(accept: str) -> None:
    async with run_cluster() as cluster, aiohttp.ClientSession() as session:
        address = cluster.registry.records[0].metrics_address
        headers = {"Accept": accept}
        async with session.get(f"http://{address}/metrics", headers=headers) as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = await response.text()
    lines = text.splitlines()
    assert "# TYPE vllm:num_requests_running gauge" in lines
    assert "# TYPE vllm:generation_tokens_total counter" in lines
    assert "# TYPE vllm:iteration_tokens_total histogram" in lines
    assert any(line.startswith("vllm:num_requests_running{") for line in lines)
    assert any(line.startswith("vllm:iteration_tokens_total_bucket{") for line in lines)
    assert "vllm_" not in text
