"""The alerts that ship: each with a severity, words and a runbook, and fired by promtool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import deploy
from tests.test_documents import OF_A_RUNNING_WORKER, exported

ROOT = Path(deploy.__file__).parents[1]
FOLDER = ROOT / "deploy" / "prometheus"
HISTOGRAM = re.compile(r"_(?:bucket|sum|count)$")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing; on Debian: prometheus"
)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_says_how_bad_it_is_and_where_to_read_on() -> None:
    headings = re.findall(
        r"^## (\w+)$", (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8"), re.MULTILINE
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
    text = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
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


@needs_promtool
def test_promtool_fires_each_alert_and_leaves_a_healthy_cluster_alone() -> None:
    command = ["promtool", "test", "rules", "alerts_test.yaml"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
