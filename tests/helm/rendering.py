"""Renders the chart as `helm template` does, without a cluster; ``lookup`` finds nothing."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from helm_python.chart import Chart

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "tandem"
PROFILES = sorted(path.stem for path in (CHART / "profiles").glob("*.yaml"))
WITH_PODS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "Job", "Pod")
Manifest = dict[str, Any]
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The manifests of one release, and its notes."""

    manifests: list[Manifest]
    notes: str
    hooks: list[Manifest] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[Manifest]:
        """All of a kind, those of tests included."""
        return [each for each in (*self.manifests, *self.hooks) if each["kind"] == kind]

    def get(self, kind: str, name: str) -> Manifest:
        """The one of that name."""
        found = [each for each in self.of_kind(kind) if each["metadata"]["name"] == name]
        assert len(found) == 1, [each["metadata"]["name"] for each in self.of_kind(kind)]
        return found[0]


def profile(name: str) -> dict[str, Any]:
    """The values of a profile."""
    text = (CHART / "profiles" / f"{name}.yaml").read_text(encoding="utf-8")
    values: dict[str, Any] = yaml.safe_load(text)
    return values


def merged(*layers: Values) -> dict[str, Any]:
    """Values as of several `-f`: the later ones win, maps are merged."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            is_map = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if is_map else deepcopy(value)
    return result


def nested(path: str, value: object) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def render(
    values: Values | None = None, *, name: str = "demo", namespace: str = "serving"
) -> Rendered:
    """What `helm install NAME` would make; a refused value is a HelmError.

    Where values say nothing of keys, the chart is told that this is meant.
    """
    return render_chart(CHART, values or {}, name=name, namespace=namespace)


def render_chart(chart: Path, values: Values, *, name: str, namespace: str) -> Rendered:
    """The same of another chart."""
    with Chart.load(chart) as loaded:
        told = {"keys": {"allowAnonymous": True}, **values}
        files = loaded.render(told, name=name, namespace=namespace)
    notes, manifests, hooks = "", [], []
    for path, text in files.items():
        if path.endswith("NOTES.txt"):
            notes = text
            continue
        for manifest in filter(None, yaml.safe_load_all(text)):
            annotations = manifest["metadata"].get("annotations", {})
            (hooks if "helm.sh/hook" in annotations else manifests).append(manifest)
    return Rendered(manifests=manifests, notes=notes, hooks=hooks)


def probe(tmp_path: Path, call: str, live: object, **further: object) -> Any:
    """What a helper makes of a live object, which no cluster has here to look up."""
    chart = tmp_path / "tandem"
    shutil.copytree(CHART, chart)
    head = "apiVersion: v1\nkind: Probe\nmetadata: {name: probe}\nout: |\n"
    text = head + '  {{- include "' + call + " | nindent 2 }}\n"
    (chart / "templates" / "probe.yaml").write_text(text)
    values = {"global": {"live": live}, **further}
    rendered = render_chart(chart, values, name="demo", namespace="serving")
    return yaml.safe_load(rendered.get("Probe", "probe")["out"])


def pod_template(manifest: Manifest) -> Manifest:
    """The pod of a workload."""
    spec = manifest["spec"]
    if manifest["kind"] == "LeaderWorkerSet":
        spec = spec["leaderWorkerTemplate"]
        template: Manifest = spec["workerTemplate"]
        return template
    template = manifest if manifest["kind"] == "Pod" else spec["template"]
    return template


def pod_templates(rendered: Rendered) -> dict[str, Manifest]:
    """The pods of all workloads, by the name of the workload."""
    found = {}
    for manifest in (*rendered.manifests, *rendered.hooks):
        name = manifest["metadata"]["name"]
        if manifest["kind"] in WITH_PODS:
            found[name] = pod_template(manifest)
    return found
