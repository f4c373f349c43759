"""The alerts that ship: each with a severity, words and a runbook, and fired by promtool."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import deploy
from tests.prometheus import VERSIONS, find_program, why_missing
from tests.test_documents import OF_A_RUNNING_WORKER, exported

ROOT = Path(deploy.__file__).parents[1]
FOLDER = ROOT / "deploy" / "prometheus"
HISTOGRAM = re.compile(r"_(?:bucket|sum|count)$")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_says_how_bad_it_is_and_where_to_read_on() -> None:
    headings = re.findall(
        r"^## (\w+)$",
        (ROOT / "docs" / "use" / "runbooks.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert [rule["alert"] for rule in rules()] == headings
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["for"]
        assert rule["annotations"]["summary"].endswith(".")
        page, anchor = rule["annotations"]["runbook_url"].split("#")
        assert (ROOT / page).is_file()
        assert anchor == rule["alert"].lower()


def test_every_runbook_says_meaning_check_and_fix() -> None:
    text = (ROOT / "docs" / "use" / "runbooks.md").read_text(encoding="utf-8")
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert re.findall(r"^\*\*(\w+)\*\*:", part, re.MULTILINE) == ["Means", "Check", "Fix"], part


def test_alerts_name_metrics_that_exist() -> None:
    known = exported() | OF_A_RUNNING_WORKER
    for rule in rules():
        for name in re.findall(r"\bpd_\w+", rule["expr"]):
            assert HISTOGRAM.sub("", name) in known or name in known, rule["alert"]


def test_every_alert_has_a_test_of_its_own() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text(encoding="utf-8"))["tests"]
    fired = {
        check["alertname"]
        for test in tests
        for check in test["alert_rule_test"]
        if check["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules()}


def test_every_window_holds_scrapes_enough_for_a_rate() -> None:
    """Prometheus 3 leaves out the sample on a window's left edge: N intervals hold N."""
    values = yaml.safe_load((ROOT / "helm" / "tandem" / "values.yaml").read_text(encoding="utf-8"))
    interval_s = values["monitoring"]["intervalSeconds"]
    windows = [minutes for rule in rules() for minutes in re.findall(r"\[(\d+)m\]", rule["expr"])]
    assert len(windows) == sum(rule["expr"].count("[") for rule in rules()) > 10
    assert min(map(int, windows)) * 60 >= 4 * interval_s


@pytest.mark.parametrize("version", VERSIONS)
def test_promtool_fires_each_alert_and_leaves_a_healthy_cluster_alone(version: int) -> None:
    promtool = find_program("promtool", version)
    if promtool is None:
        pytest.skip(why_missing(version))
    command = [promtool, "test", "rules", "alerts_test.yaml"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
