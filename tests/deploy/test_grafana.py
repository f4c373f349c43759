"""The dashboards that ship: equal to their table, and in a shape that Grafana takes."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.grafana import build
from tests.test_documents import OF_A_RUNNING_WORKER, exported

FOLDER = Path(build.__file__).parent
DASHBOARDS = sorted(FOLDER.glob("*.json"))
NAMES = {"overview", "prefill", "decode", "transfer", "router", "experts"}
HISTOGRAM = re.compile(r"_(?:bucket|sum|count)$")


def read(path: Path) -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return dashboard


def queries_of(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def test_the_files_are_those_of_the_table() -> None:
    found = {path: path.read_text(encoding="utf-8") for path in DASHBOARDS}
    assert found == build.files(), "Fix: python -m deploy.grafana.build"
    assert {path.stem for path in found} == NAMES


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_can_be_imported_anywhere(path: Path) -> None:
    dashboard = read(path)
    assert dashboard["uid"] == f"tandem-{path.stem}"
    assert "id" not in dashboard, "it would overwrite another one"
    assert dashboard["schemaVersion"] == 39
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables)[:5] == ["datasource", "namespace", "model", "role", "instance"]
    assert variables["datasource"]["type"] == "datasource"
    used: set[str] = set()

    def note(entry: dict[str, Any]) -> dict[str, Any]:
        if "datasource" in entry:
            used.add(entry["datasource"]["uid"])
        return entry

    json.loads(path.read_text(encoding="utf-8"), object_hook=note)
    assert used == {"${datasource}"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_lie_beside_one_another(path: Path) -> None:
    panels = read(path)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24, panel["title"]
        cells = set(
            itertools.product(
                range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"])
            )
        )
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_queries_follow_the_variables_and_the_scrape_interval(path: Path) -> None:
    known = {variable["name"] for variable in read(path)["templating"]["list"]}
    for expr in queries_of(read(path)):
        selectors = re.findall(r"\b(?:pd_|vllm:)\w+(\{[^}]*\})?", expr)
        assert selectors, expr
        for selector in selectors:
            assert build.FILTER in selector, expr
        for window in re.findall(r"\[([^\]]+)\]", expr):
            assert window == "$__rate_interval", expr
        used = set(re.findall(r"\$(\w+)", expr)) - {"__rate_interval"}
        assert used <= known, expr


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_queries_name_metrics_that_exist(path: Path) -> None:
    known = exported() | OF_A_RUNNING_WORKER
    for expr in queries_of(read(path)):
        for name in re.findall(r"\bpd_\w+(?=\{)", expr):
            assert HISTOGRAM.sub("", name) in known or name in known, expr


def test_a_kind_of_panel_that_grafana_has_not_is_refused() -> None:
    query = build.Query(expr="pd_process_info{@}", legend="")
    with pytest.raises(ValueError, match="one of timeseries, stat, heatmap"):
        build.Panel(title="t", queries=[query], kind="pie")
