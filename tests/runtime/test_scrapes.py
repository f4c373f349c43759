"""What real Prometheuses, 2 and 3, store of each role's metrics, however they are set up to ask."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.metrics.core import MetricsServer, render_metrics
from runtime.metrics.rows import HistogramRow
from runtime.metrics.vllm_names import PREFIX, ROWS, VllmNames
from runtime.net.credentials import Listen
from tests.prometheus import SCRAPED_EVERY, Prometheus, find_program, why_missing
from tests.runtime.exports import Exports, make_exports
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

WAYS = {
    2: {"usual": ""},
    3: {
        "usual": "",
        "protobuf": "scrape_protocols: [PrometheusProto]",
        "open": "scrape_protocols: [OpenMetricsText1.0.0]",
        "legacy": "metric_name_validation_scheme: legacy, metric_name_escaping_scheme: underscores",
        "native": (
            "convert_classic_histograms_to_nhcb: true, always_scrape_classic_histograms: true"
        ),
    },
}
"""Settings of scrape jobs, by major version and the job's name. None has a
`fallback_scrape_protocol`: our answer says what it is."""


@contextlib.asynccontextmanager
async def served(exports: Exports) -> AsyncIterator[dict[str, str]]:
    """A process of each role that answers scrapes; host and port by role."""
    servers = {
        role: MetricsServer(registry, vllm=VllmNames(role=role, model="m", rank=3))
        for role, registry in exports.registries.items()
    }
    try:
        ports = {
            role: await server.start(Listen(bind="127.0.0.1")) for role, server in servers.items()
        }
        yield {role: f"127.0.0.1:{port}" for role, port in ports.items()}
    finally:
        for server in servers.values():
            await server.stop()


def config_of(targets: dict[str, str], ways: dict[str, str]) -> str:
    lines = [f"global: {SCRAPED_EVERY}", "scrape_configs:"]
    for job, settings in ways.items():
        where = f"static_configs: [{{targets: {list(targets.values())}}}]"
        lines.append(f"  - {{job_name: {job}, {where}, {settings}}}")
    return "\n".join(lines)


def exported(
    exports: Exports, targets: dict[str, str], job: str
) -> set[frozenset[tuple[str, str]]]:
    """Names and labels of all samples, as every Prometheus has to store them."""
    found = set()
    for role, registry in exports.registries.items():
        text = render_metrics(registry, VllmNames(role=role, model="m", rank=3)).decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                own = {"__name__": sample.name, "job": job, "instance": targets[role]}
                found.add(frozenset({**sample.labels, **own}.items()))
    return found


@pytest.mark.parametrize("version", WAYS)
async def test_every_series_is_stored_as_it_is_exported(version: int, tmp_path: Path) -> None:
    program = await asyncio.to_thread(find_program, "prometheus", version)
    if program is None:
        pytest.skip(why_missing(version))
    exports = make_exports()
    async with served(exports) as targets:
        config = config_of(targets, WAYS[version])
        server = Prometheus(program, config, tmp_path, "--enable-feature=native-histograms")
        expected = {job: exported(exports, targets, job) for job in WAYS[version]}
        await asyncio.to_thread(check, server, expected)


def check(server: Prometheus, expected: dict[str, set[frozenset[tuple[str, str]]]]) -> None:
    """``expected`` is by job."""
    with server:
        num_scrapes = 3 * len(expected)
        wait_until(lambda: len(server.query("up == 1")) == num_scrapes, "all are scraped")
        assert [one["lastError"] for one in server.scrapes()] == [""] * num_scrapes
        types = server.types()
        for job, series in expected.items():
            stored = server.series(f'{{job="{job}",__name__=~"pd_.+|vllm.+|U__.+"}}')
            # Native histograms have the bare name, which is nobody's else.
            native = {one for one in stored if types.get(dict(one)["__name__"]) == "histogram"}
            assert sorted(map(sorted, (stored - native) ^ series)) == [], job
            assert bool(native) == (job == "native")
    for rows in ROWS.values():
        for row in rows:
            kind = "histogram" if isinstance(row, HistogramRow) else row.kind
            suffix = "_total" if kind == "counter" else ""
            assert types[PREFIX + row.name + suffix] == kind


def test_bounds_of_buckets_are_spelled_as_prometheus_3_stores_them() -> None:
    """It writes `1` as `1.0`; who spells so from the start is read the same by both."""
    exports = make_exports()
    for role, registry in exports.registries.items():
        text = render_metrics(registry, VllmNames(role=role, model="m")).decode()
        bounds = set(re.findall(r'\b(?:le|quantile)="([^"]*)"', text))
        assert len(bounds) > 20
        for bound in bounds - {"+Inf"}:
            assert re.fullmatch(r"\d+\.\d+|\d+(\.\d+)?e[+-]\d\d", bound), bound
