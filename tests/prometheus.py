"""Real Prometheuses for tests, 2 and 3: which are here, and servers that scrape every second."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from deploy.ports import free_port
from tests.waiting import wait_until

VERSIONS = (2, 3)
"""Of Debian 12 and 13, and of what came after."""
FOLDER = Path(__file__).parents[1] / ".prometheus-3"
"""Where `scripts/prometheus_3.sh` leaves its programs, or why it could not."""
SCRAPED_EVERY = "{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}"


def find_program(name: str, version: int, folder: Path = FOLDER) -> Path | None:
    """`prometheus` or `promtool` of a major version, in `folder` or on the path."""
    for found in (shutil.which(name, path=str(folder)), shutil.which(name)):
        if found is not None and _major(found) == version:
            return Path(found)
    return None


def why_missing(version: int, folder: Path = FOLDER) -> str:
    """What to say of a version that is not here."""
    if version == 2:
        return "no Prometheus 2; on Debian 12 or 13: apt-get install prometheus"
    told = folder / "missing"
    reason = told.read_text(encoding="utf-8").strip() if told.exists() else "not fetched yet"
    return f"no Prometheus {version}, {reason}; fix: scripts/prometheus_3.sh"


def _major(program: str) -> int | None:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"version (\d+)\.", done.stdout + done.stderr)
    return int(match[1]) if match else None


def config_of_cluster(router: str, rules: Path) -> str:
    """As docs/use/metrics.md has it; `router` is host:port of its HTTP, and tells of workers."""
    return f"""\
global: {SCRAPED_EVERY}
rule_files: ['{rules}']
scrape_configs:
  - job_name: tandem-router
    static_configs: [{{targets: ['{router}']}}]
  - job_name: tandem-workers
    http_sd_configs: [{{url: 'http://{router}/targets', refresh_interval: 1s}}]
"""


class Prometheus:
    """One server; use it as a context manager."""

    def __init__(self, program: Path, config: str, folder: Path, *flags: str) -> None:
        """`program` runs with `config`, the text of a prometheus.yml, and writes in `folder`."""
        self._flags = flags
        self._program = program
        self._folder = folder
        self._address = f"127.0.0.1:{free_port('127.0.0.1')}"
        self._config = config

    def __enter__(self) -> Prometheus:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "prometheus.yml").write_text(self._config)
        log = self._folder / "prometheus.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={self._folder}/prometheus.yml",
                    f"--storage.tsdb.path={self._folder}/data",
                    f"--web.listen-address={self._address}",
                    *self._flags,
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until(self._is_ready, "Prometheus is ready")
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

    def series(self, selector: str) -> set[frozenset[tuple[str, str]]]:
        """Names and labels of all that was ever stored and fits."""
        return {frozenset(one.items()) for one in self._get("series", **{"match[]": selector})}

    def types(self) -> dict[str, str]:
        """The type of each metric, as the scraped text told it."""
        return {name: told[0]["type"] for name, told in self._get("metadata").items()}

    def scrapes(self) -> list[dict[str, Any]]:
        """What is scraped, with `health` and `lastError`."""
        targets: list[dict[str, Any]] = self._get("targets")["activeTargets"]
        return targets

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
