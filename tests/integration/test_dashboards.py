"""A real Prometheus scrapes a cluster under load: no query of a dashboard or an alert is empty."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import deploy
from runtime.config import ClusterConfig, DecodeSection, ModelSection
from tests.integration.client import run_all
from tests.integration.cluster import Cluster, wait_until
from tests.integration.conftest import MODEL_DIR
from tests.prometheus import Prometheus, needs_prometheus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_prometheus]

DEPLOY = Path(deploy.__file__).parent
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
NEVER_HAPPENS_HERE = {"Pause of a request that moves"}
"""Panels that may have nothing but NaN: quantiles of what takes an incident."""
WINDOW = "10s"
TIMEOUT_S = 240.0
NUM_PROCESSES = 4
"""A router, a prefill worker and two decode ranks."""


class Load:
    """Requests until told to stop, on a thread of its own."""

    def __init__(self, base_url: str, prompts: list[list[int]]) -> None:
        self._base_url = base_url
        self._prompts = prompts
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_failed = 0
        self._thread.start()

    def stop(self) -> None:
        """Let those that run end."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        params = [{"model": "tandem-python", "max_tokens": 24} for _ in self._prompts]
        while not self._is_over.is_set():
            answers = run_all(self._base_url, self._prompts, params)
            self.num_failed += sum(answer.status != 200 for answer in answers)


@pytest.fixture(scope="module")
def prometheus(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> Iterator[Prometheus]:
    """It scrapes a cluster with expert-parallel decode ranks, which has requests all the time."""
    config = ClusterConfig(model=ModelSection(path=str(MODEL_DIR)), decode=DecodeSection(dp=2))
    folder = tmp_path_factory.mktemp("dashboards")
    with Cluster(config, folder) as cluster:
        router = cluster.base_url.removeprefix("http://")
        with Prometheus(router, ALERTS, folder / "prometheus") as running:
            load = Load(cluster.base_url, prompts)
            try:
                wait_until(
                    lambda: len(running.query("pd_process_info")) == NUM_PROCESSES,
                    TIMEOUT_S,
                    "every process is scraped",
                )
                yield running
            finally:
                load.stop()
        assert load.num_failed == 0
        cluster.wait_idle()


def dashboard(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def resolve(expr: str, variables: dict[str, str]) -> str:
    """The query as Grafana sends it."""
    for name, value in variables.items():
        expr = expr.replace(f"${name}", value)
    assert "$" not in expr, expr
    return expr


def variables_of(content: dict[str, Any], prometheus: Prometheus) -> dict[str, str]:
    """All of everything, as the dashboard says it; of choices the one that is set."""
    values = {"__rate_interval": WINDOW}
    for variable in content["templating"]["list"]:
        name = variable["name"]
        if variable["type"] == "custom":
            values[name] = variable["current"]["value"]
        elif "allValue" in variable:
            values[name] = variable["allValue"]
        elif variable["type"] == "query":
            found = [
                labels[name] for labels, _ in prometheus.query(_values_query(variable, values))
            ]
            values[name] = "|".join(re.escape(value).replace("\\", "\\\\") for value in found)
    return values


def _values_query(variable: dict[str, Any], values: dict[str, str]) -> str:
    match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
    assert match, variable
    return resolve(f"group by ({match[2]}) ({match[1]})", values)


def operands(expr: str) -> list[str]:
    """What an alert compares, without what it compares it to."""
    parts = re.split(r"\s(?:and|or|unless)\s", expr)
    found = []
    for part in parts:
        bare = re.sub(r"\s[=<>!]=?\s*[\d.]+$", "", part)
        bare = re.sub(r"\soffset \w+", "", bare)
        absent = re.fullmatch(r"absent\((.*)\)", bare)
        found.append(absent[1] if absent else bare)
    return found


def wait_for_numbers(prometheus: Prometheus, queries: dict[str, str]) -> None:
    """Until every query has answered a number, or at all where it may be NaN; names the others."""

    def has_data(name: str, expr: str) -> bool:
        if name.split(":")[0] in NEVER_HAPPENS_HERE:
            return bool(prometheus.query(expr))
        return prometheus.has_numbers(expr)

    left = dict(queries)

    def all_answered() -> bool:
        for name in [name for name, expr in left.items() if has_data(name, expr)]:
            del left[name]
        return not left

    try:
        wait_until(all_answered, TIMEOUT_S, "all queries have data")
    except AssertionError:
        raise AssertionError(f"no data: {json.dumps(left, indent=2)}") from None


def test_prometheus_finds_every_process_and_keeps_the_colons(prometheus: Prometheus) -> None:
    assert [value for _, value in prometheus.query("count(up)")] == [NUM_PROCESSES]
    running = prometheus.query("vllm:num_requests_running")
    assert sorted((labels["role"], labels["engine"]) for labels, _ in running) == [
        ("decode", "0"),
        ("decode", "1"),
        ("prefill", "0"),
    ]
    assert {labels["model_name"] for labels, _ in running} == {"tandem-python"}
    assert prometheus.query("vllm:e2e_request_latency_seconds_count")
    assert prometheus.query('{__name__=~"vllm_.*"}') == []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_a_dashboard_has_data(prometheus: Prometheus, path: Path) -> None:
    content = dashboard(path)
    variables = variables_of(content, prometheus)
    queries = {
        f"{panel['title']}:{target['refId']}": resolve(target["expr"], variables)
        for panel in content["panels"]
        for target in panel.get("targets", ())
    }
    assert queries
    wait_for_numbers(prometheus, queries)


def test_every_operand_of_an_alert_has_data(prometheus: Prometheus) -> None:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    queries = {
        f"{rule['alert']}:{index}": operand
        for group in groups
        for rule in group["rules"]
        for index, operand in enumerate(operands(rule["expr"]))
    }
    wait_for_numbers(prometheus, queries)
    rules = prometheus.rules()
    assert {rule["name"]: rule["lastError"] for rule in rules if "lastError" in rule} == {}
    assert len(rules) == sum(len(group["rules"]) for group in groups)
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
