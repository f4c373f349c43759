"""A real Prometheus for tests: scrapes a cluster every second, and answers queries."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from deploy.ports import free_port
from tests.integration.cluster import wait_until

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is missing; on Debian: prometheus"
)
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: ['{rules}']
scrape_configs:
  - job_name: tandem-router
    static_configs: [{{targets: ['{router}']}}]
  - job_name: tandem-workers
    http_sd_configs: [{{url: 'http://{router}/targets', refresh_interval: 1s}}]
"""


class Prometheus:
    """One server; use it as a context manager."""

    def __init__(self, router: str, rules: Path, folder: Path) -> None:
        """`router` is host:port of its HTTP, `rules` a file of alerts."""
        self._folder = folder
        self._address = f"127.0.0.1:{free_port('127.0.0.1')}"
        self._config = CONFIG.format(router=router, rules=rules)

    def __enter__(self) -> Prometheus:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "prometheus.yml").write_text(self._config)
        log = self._folder / "prometheus.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._folder}/prometheus.yml",
                    f"--storage.tsdb.path={self._folder}/data",
                    f"--web.listen-address={self._address}",
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until(self._is_ready, 60, "Prometheus is ready")
        except BaseException:
            self.__exit__()
            raise AssertionError(log.read_text()) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values of an instant query's vector."""
        result = self._get("query", query=expr)["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def has_numbers(self, expr: str) -> bool:
        """Whether a query answers anything but NaN."""
        return any(not math.isnan(value) for _, value in self.query(expr))

    def rules(self) -> list[dict[str, Any]]:
        """All rules, with what became of them."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        url = f"http://{self._address}/api/v1/{path}?{query}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, "Prometheus ended"
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False
