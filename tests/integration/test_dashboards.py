"""Real Prometheuses, 2 and 3, scrape a cluster under load: no query of ours comes back empty."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import deploy
from runtime.config import (
    ClusterConfig,
    DecodeSection,
    ModelSection,
    RouterSection,
    TierSection,
)
from tests.integration.client import run_all
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR
from tests.prometheus import VERSIONS, Prometheus, config_of_cluster, find_program, why_missing
from tests.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

DEPLOY = Path(deploy.__file__).parent
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
WINDOW = "10s"
INCIDENT_WINDOW = "10m"
OF_INCIDENTS = {"Pause of a request that moves"}
"""Panels of what happens once here, before the queries."""
OF_KEYS = "pd_router_key"
"""Series of API keys, of which this cluster has none (`tests/router/http/test_keys.py` has)."""
TIMEOUT_S = 240.0
NUM_PROCESSES = 4
"""A router, a prefill worker and two decode ranks."""


MOVED = "pd_router_migrations_total > 0"
MOST_LOSSES = 5
"""Of decode, until one has met a request there: between two turns of the load there is none."""

PAUSE_S = 0.5
"""Of the load: cores are there for whoever is asked as well."""


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
        while not self._is_over.wait(PAUSE_S):
            answers = run_all(self._base_url, self._prompts, params)
            self.num_failed += sum(answer.status != 200 for answer in answers)


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> Iterator[Mapping[int, Prometheus]]:
    """By major version, those that are here, over one cluster that has requests all the time.

    Its decode ranks share experts, may move them and verify drafts, so that panels of those have
    data. They are lost, and come back: their requests wait and go on.
    """
    programs = {version: find_program("prometheus", version) for version in VERSIONS}
    if not any(programs.values()):
        pytest.skip(why_missing(2))
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        router=RouterSection(worker_wait_s=TIMEOUT_S),
        decode=DecodeSection(dp=2, num_speculative_tokens=1, rebalance_experts="on"),
        tiers=(TierSection(name="base", ttft_ms=1000.0, tpot_ms=50.0),),
    )
    folder = tmp_path_factory.mktemp("dashboards")
    with Cluster(config, folder) as cluster, contextlib.ExitStack() as stack:
        of_cluster = config_of_cluster(cluster.base_url.removeprefix("http://"), ALERTS)
        running = {
            version: stack.enter_context(
                Prometheus(program, of_cluster, folder / f"prometheus-{version}")
            )
            for version, program in programs.items()
            if program is not None
        }
        load = Load(cluster.base_url, prompts)
        try:
            wait_scraped(cluster, running)
            for server in running.values():
                wait_until(
                    lambda server=server: server.has_numbers(
                        "pd_decode_generated_tokens_total > 0"
                    ),
                    "requests are in decode",
                    TIMEOUT_S,
                )
            for _ in range(MOST_LOSSES):
                cluster.kill("decode-0/0")
                cluster.wait_exit("decode-0/1")
                cluster.start_instance("decode", 0)
                cluster.wait_workers(NUM_PROCESSES - 1)
                wait_scraped(cluster, running)
                if all(server.has_numbers(MOVED) for server in running.values()):
                    break
            yield running
        finally:
            load.stop()
        assert load.num_failed == 0
        cluster.wait_idle()


def wait_scraped(cluster: Cluster, servers: Mapping[int, Prometheus]) -> None:
    """Until each server scrapes each process that lives, and no other."""
    status = cluster.status()
    assert status is not None
    living = {(worker["metrics_address"], 1.0) for worker in status["workers"]}
    living.add((cluster.base_url.removeprefix("http://"), 1.0))
    for server in servers.values():
        wait_until(
            lambda server=server: (
                {(labels["instance"], value) for labels, value in server.query("up")} == living
            ),
            "every process is scraped",
            TIMEOUT_S,
        )


@pytest.fixture(params=VERSIONS)
def prometheus(request: pytest.FixtureRequest, servers: Mapping[int, Prometheus]) -> Prometheus:
    """The server of one major version."""
    if request.param not in servers:
        pytest.skip(why_missing(request.param))
    return servers[request.param]


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
    """Until every query has answered a number; names the others."""
    left = dict(queries)

    def all_answered() -> bool:
        for name in [name for name, expr in left.items() if prometheus.has_numbers(expr)]:
            del left[name]
        return not left

    try:
        wait_until(all_answered, "all queries have data", TIMEOUT_S)
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
    assert prometheus.query('{__name__=~"vllm_.*|U__.*"}') == []
    for one in prometheus.scrapes():
        assert (one["health"], one["lastError"]) == ("up", ""), one


def test_both_versions_have_the_same_series(servers: Mapping[int, Prometheus]) -> None:
    """Names, types, labels, bounds of buckets: a query means the same to both."""
    for version in VERSIONS:
        if version not in servers:
            pytest.skip(why_missing(version))
    ours = '{__name__=~"pd_.+|vllm:.+"}'
    assert servers[2].types() == servers[3].types()

    def series(version: int) -> set[frozenset[tuple[str, str]]]:
        return {frozenset(labels.items()) for labels, _ in servers[version].query(ours)}

    def differing() -> list[Any]:
        return sorted(map(sorted, series(2) ^ series(3)))

    assert len(series(2)) > 1000
    try:
        wait_until(lambda: not differing(), "the same series")
    except AssertionError:
        raise AssertionError(json.dumps(differing()[:20], indent=2)) from None
    # Bounds of buckets as Prometheus 3 writes them, so as every query has to.
    bounds = {dict(one).get("le", "+Inf") for one in series(3)}
    assert all(re.fullmatch(r"\+Inf|.*[.e].*", bound) for bound in bounds), bounds


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_a_dashboard_has_data(prometheus: Prometheus, path: Path) -> None:
    content = dashboard(path)
    variables = variables_of(content, prometheus)
    of_incidents = {**variables, "__rate_interval": INCIDENT_WINDOW}
    queries = {
        f"{panel['title']}:{target['refId']}": resolve(
            target["expr"], of_incidents if panel["title"] in OF_INCIDENTS else variables
        )
        for panel in content["panels"]
        for target in panel.get("targets", ())
        if OF_KEYS not in target["expr"]
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
        if OF_KEYS not in operand
    }
    wait_for_numbers(prometheus, queries)
    rules = prometheus.rules()
    assert {rule["name"]: rule["lastError"] for rule in rules if "lastError" in rule} == {}
    assert len(rules) == sum(len(group["rules"]) for group in groups)
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
