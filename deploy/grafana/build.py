"""Makes the dashboards: `python -m deploy.grafana.build` writes them, `--check` says what differs.

One table (`panels.toml`) holds all queries; what they have in common stands here: variables, grid,
units, colors. The JSON is that of Grafana 10 and later (schema 39).
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
TABLE = FOLDER / "panels.toml"
SCHEMA_VERSION = 39
GRID_WIDTH = 24
PANEL_HEIGHT, STAT_HEIGHT = 8, 4
KINDS = ("timeseries", "stat", "heatmap")
FILTER = 'namespace=~"$namespace",instance=~"$instance"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One line, or several of one shape. `{@}` in `expr` stands for the variables."""

    expr: str
    legend: str

    @property
    def promql(self) -> str:
        """With the variables in their place."""
        return self.expr.replace("{@", "{" + FILTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        title: says what is measured.
        queries: its lines.
        kind: one of `KINDS`.
        unit: Grafana's name of it.
        description: what a high or low value means.
        thresholds: colors and the values from which they count.
        stack: lines on top of one another.
        width: of 24 columns.
        max: of the axis, where there is one.
    """

    title: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    unit: str = "short"
    description: str = ""
    thresholds: Sequence[tuple[str, float]] = ()
    stack: bool = False
    width: int = 8
    max: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.title}: kind = {self.kind!r}. Fix: one of {', '.join(KINDS)}")

    @property
    def height(self) -> int:
        """In units of the grid."""
        return STAT_HEIGHT if self.kind == "stat" else PANEL_HEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels below one heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One file. `slo`: with variables for the objectives of latency."""

    name: str
    title: str
    description: str
    rows: Sequence[Row]
    slo: bool = False


def read_table(path: Path = TABLE) -> list[Dashboard]:
    """All dashboards."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return [_dashboard(name, entry) for name, entry in table.items()]


def _dashboard(name: str, entry: Mapping[str, Any]) -> Dashboard:
    rows = [
        Row(title=row["title"], panels=[_panel(panel) for panel in row["panel"]])
        for row in entry["row"]
    ]
    others = {key: value for key, value in entry.items() if key != "row"}
    return Dashboard(name=name, rows=rows, **others)


def _panel(entry: Mapping[str, Any]) -> Panel:
    queries = [Query(**query) for query in entry["queries"]]
    thresholds = [(color, value) for color, value in entry.get("thresholds", ())]
    return Panel(**{**entry, "queries": queries, "thresholds": thresholds})


def build(dashboard: Dashboard) -> Json:
    """The dashboard as Grafana imports it."""
    return {
        "uid": f"tandem-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["tandem"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "links": [_links()],
        "templating": {"list": _variables(dashboard)},
        "panels": _place(dashboard.rows),
    }


def _links() -> Json:
    return {
        "type": "dashboards",
        "title": "Tandem",
        "tags": ["tandem"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
    }


def _variables(dashboard: Dashboard) -> list[Json]:
    """Each narrows the next; queries name only the last and the namespace."""
    chosen = 'pd_process_info{namespace=~"$namespace",model=~"$model",role=~"$role"}'
    variables: list[Json] = [
        {"type": "datasource", "name": "datasource", "query": "prometheus", "label": "Source"},
        # A cluster outside Kubernetes has no namespace: `.*` matches a label that is not there.
        _variable("namespace", "pd_process_info", all_value=".*"),
        _variable("model", 'pd_process_info{namespace=~"$namespace"}', all_value=".*"),
        _variable("role", 'pd_process_info{namespace=~"$namespace"}', all_value=".*"),
        _variable("instance", chosen),
    ]
    if dashboard.slo:
        variables.append(_choice("ttft_slo", ["0.25", "0.5", "1.0", "2.5", "5.0", "10.0"], "1.0"))
        variables.append(_choice("itl_slo", ["0.02", "0.03", "0.05", "0.1", "0.2"], "0.05"))
    return variables


def _variable(name: str, metric: str, *, all_value: str | None = None) -> Json:
    """A label's values; without `all_value` All is all that are found."""
    query = f"label_values({metric}, {name})"
    return {
        "type": "query",
        "name": name,
        "label": name.capitalize(),
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
        **({"allValue": all_value} if all_value else {}),
    }


def _choice(name: str, values: Sequence[str], default: str) -> Json:
    options = [{"text": v, "value": v, "selected": v == default} for v in values]
    return {
        "type": "custom",
        "name": name,
        "label": f"{name.removesuffix('_slo').upper()} objective (s)",
        "query": ",".join(values),
        "options": options,
        "current": {"text": default, "value": default},
    }


def _place(rows: Sequence[Row]) -> list[Json]:
    """Rows below one another; within one, panels from left to right as long as they fit."""
    placed: list[Json] = []
    y = 0
    for row in rows:
        grid = {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1}
        placed.append(
            {
                "id": len(placed) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": grid,
            }
        )
        y += 1
        x = height = 0
        for panel in row.panels:
            if x + panel.width > GRID_WIDTH:
                x, y, height = 0, y + height, 0
            grid = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            placed.append({"id": len(placed) + 1, "gridPos": grid, **_body(panel)})
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return placed


def _body(panel: Panel) -> Json:
    is_heatmap = panel.kind == "heatmap"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": query.promql,
            "legendFormat": query.legend,
            "range": True,
            **({"format": "heatmap"} if is_heatmap else {}),
        }
        for index, query in enumerate(panel.queries)
    ]
    defaults: Json = {"unit": panel.unit, "min": 0, "custom": _style(panel)}
    if panel.max is not None:
        defaults["max"] = panel.max
    if panel.thresholds:
        defaults["thresholds"] = {"mode": "absolute", "steps": _steps(panel.thresholds)}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
    }


def _style(panel: Panel) -> Json:
    if panel.kind != "timeseries":
        return {}
    style: Json = {"lineWidth": 1, "fillOpacity": 20 if panel.stack else 0, "spanNulls": False}
    style["stacking"] = {"mode": "normal" if panel.stack else "none", "group": "A"}
    if panel.thresholds:
        style["thresholdsStyle"] = {"mode": "dashed"}
    return style


def _steps(thresholds: Sequence[tuple[str, float]]) -> list[Json]:
    """The first color counts from below."""
    return [
        {"color": color, "value": value if index else None}
        for index, (color, value) in enumerate(thresholds)
    ]


def _options(panel: Panel) -> Json:
    match panel.kind:
        case "stat":
            reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area"}
        case "heatmap":
            axis = {"unit": panel.unit}
            return {"calculate": False, "yAxis": axis, "cellGap": 1, "legend": {"show": False}}
        case _:
            legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def files() -> dict[Path, str]:
    """What the folder has to hold."""
    return {
        FOLDER / f"{dashboard.name}.json": json.dumps(build(dashboard), indent=2) + "\n"
        for dashboard in read_table()
    }


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description="Makes the Grafana dashboards of panels.toml.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 where a file differs"
    )
    is_check = parser.parse_args().check
    stale = []
    for path, text in files().items():
        if is_check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            stale.append(path.name)
        elif not is_check:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"{', '.join(stale)} differ from panels.toml. Fix: python -m deploy.grafana.build")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
