"""What may be told to a pod holds for every pod of a release, and a part may be told otherwise."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python.chart import Chart

from tests.helm.rendering import (
    CHART,
    Manifest,
    Rendered,
    merged,
    nested,
    pod_templates,
    profile,
    render,
)

FETCHED = {
    "source": "claim",
    "existingClaim": "",
    "path": "",
    "download": {"from": "deepseek-ai/DeepSeek-R1"},
}
NODES = nested("networkPolicy.nodeCIDRs", ["10.0.0.0/16"])
TOLERATIONS = [{"key": "taint", "operator": "Exists"}]
AFFINITY = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
SPREAD = [{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
VOLUME = {"name": "ca", "configMap": {"name": "bundle"}}
MOUNT = {"name": "ca", "mountPath": "/etc/bundle"}
VARIABLE = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
SOURCE = {"secretRef": {"name": "proxy"}}
KNOBS: dict[str, tuple[Any, str, Any]] = {
    "podLabels": ({"team": "a"}, "metadata.labels", {"team": "a"}),
    "podAnnotations": ({"owner": "a"}, "metadata.annotations", {"owner": "a"}),
    "podSecurityContext": (
        {"runAsUser": 2000, "supplementalGroups": [5]},
        "spec.securityContext",
        {"runAsUser": 2000, "supplementalGroups": [5], "runAsGroup": 10001},
    ),
    "containerSecurityContext": (
        {"runAsUser": 2000},
        "spec.containers.0.securityContext",
        {"runAsUser": 2000, "readOnlyRootFilesystem": True},
    ),
    "nodeSelector": ({"pool": "a"}, "spec.nodeSelector", {"pool": "a"}),
    "tolerations": (TOLERATIONS, "spec.tolerations", TOLERATIONS),
    "affinity": (AFFINITY, "spec.affinity", AFFINITY),
    "topologySpreadConstraints": (SPREAD, "spec.topologySpreadConstraints", SPREAD),
    "priorityClassName": ("high", "spec.priorityClassName", "high"),
    "runtimeClassName": ("kata", "spec.runtimeClassName", "kata"),
    "schedulerName": ("volcano", "spec.schedulerName", "volcano"),
    "hostNetwork": (True, "spec", {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}),
    "hostIPC": (True, "spec.hostIPC", True),
    "dnsPolicy": ("None", "spec.dnsPolicy", "None"),
    "dnsConfig": ({"nameservers": ["1.1.1.1"]}, "spec.dnsConfig", {"nameservers": ["1.1.1.1"]}),
    "hostAliases": ([{"ip": "10.0.0.9"}], "spec.hostAliases", [{"ip": "10.0.0.9"}]),
    "env": ([VARIABLE], "spec.containers.0.env", [VARIABLE]),
    "envFrom": ([SOURCE], "spec.containers.0.envFrom", [SOURCE]),
    "extraVolumes": ([VOLUME], "spec.volumes", [VOLUME]),
    "extraVolumeMounts": ([MOUNT], "spec.containers.0.volumeMounts", [MOUNT]),
    "image.pullSecrets": (["registry"], "spec.imagePullSecrets", [{"name": "registry"}]),
    "global.imagePullSecrets": (["registry"], "spec.imagePullSecrets", [{"name": "registry"}]),
    "serviceAccount.name": ("mine", "spec.serviceAccountName", "mine"),
}
"""A value, where a pod has it, and what is there then: a part of it, for maps and lists."""
PARTS = {
    "router": "router",
    "prefill": "prefill",
    "decode": "decode",
    "test": "test",
    "model.download": "download",
}


def everything(*changes: dict[str, Any]) -> Rendered:
    """A release of every kind of pod: routers, workers of one and of two hosts, test, download."""
    values = merged(profile("h200-ep16"), {"model": FETCHED}, NODES, *changes)
    values["workers"] = {
        key: each for key, each in values["workers"].items() if key != "tolerations"
    }
    return render(values)


def pods_of(rendered: Rendered) -> dict[str, Manifest]:
    """Every pod of a release by its component."""
    pods = pod_templates(rendered).values()
    return {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod for pod in pods}


def at(manifest: Any, path: str) -> Any:
    for key in path.split("."):
        manifest = manifest[int(key)] if isinstance(manifest, list) else manifest.get(key)
    return manifest


def has(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(found, dict) and wanted.items() <= found.items()
    if isinstance(wanted, list):
        return isinstance(found, list) and all(each in found for each in wanted)
    return bool(found == wanted)


def test_every_knob_is_tried() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert set(schema["definitions"]["pod"]["properties"]) <= set(KNOBS)


@pytest.mark.parametrize("knob", KNOBS)
def test_what_is_told_to_every_pod_every_pod_has(knob: str) -> None:
    value, path, wanted = KNOBS[knob]
    pods = pods_of(everything(nested(knob, value)))
    assert set(pods) == set(PARTS.values())
    assert [part for part, pod in pods.items() if not has(at(pod, path), wanted)] == []
    assert not any(has(at(pod, path), wanted) for pod in pods_of(everything()).values())


@pytest.mark.parametrize("part", PARTS)
def test_a_part_may_be_told_otherwise(part: str) -> None:
    told = {"tolerations": [], "priorityClassName": "own", "nodeSelector": {"pool": "own"}}
    common = {"tolerations": TOLERATIONS, "priorityClassName": "all", "nodeSelector": {"os": "l"}}
    pods = pods_of(everything(common, nested(part, told)))
    own = pods[PARTS[part]]["spec"]
    assert "tolerations" not in own
    assert (own["priorityClassName"], own["nodeSelector"]) == ("own", {"os": "l", "pool": "own"})
    assert pods["decode" if part != "decode" else "prefill"]["spec"]["tolerations"] == TOLERATIONS


def test_the_test_and_the_download_run_where_the_routers_do() -> None:
    """All nodes are tainted, and each role was told what is no hindrance to it."""
    told = {"tolerations": TOLERATIONS, "nodeSelector": {"pool": "cpu"}, "env": [VARIABLE]}
    image = {"registry": "mine", "digest": "sha256:" + "a" * 64}
    pods = pods_of(everything({"router": {**told, "image": image}}))
    for part in ("test", "download"):
        spec = pods[part]["spec"]
        assert (spec["tolerations"], spec["nodeSelector"]) == (TOLERATIONS, {"pool": "cpu"})
        assert spec["containers"][0]["image"] == pods["router"]["spec"]["containers"][0]["image"]
        assert VARIABLE not in spec["containers"][0].get("env", [])
    own = pods_of(everything({"router": told, "test": {"tolerations": []}}))["test"]
    assert "tolerations" not in own["spec"]


@pytest.mark.parametrize(
    ("values", "router", "decode"),
    [
        ({}, "tandem-serve:0.1.0-cpu", "tandem-serve:0.1.0-gpu"),
        ({"image": {"registry": "r/x", "tag": "t"}}, "r/x/tandem-serve:t", "r/x/tandem-serve:t"),
        ({"global": {"imageRegistry": "g"}}, "g/tandem-serve:0.1.0-cpu",
         "g/tandem-serve:0.1.0-gpu"),
        ({"global": {"imageRegistry": "g"}, "image": {"registry": "r"}},
         "r/tandem-serve:0.1.0-cpu", "r/tandem-serve:0.1.0-gpu"),
        ({"router": {"image": {"digest": "sha256:" + "a" * 64}},
          "decode": {"image": {"repository": "gpu", "digest": "sha256:" + "b" * 64}}},
         "tandem-serve@sha256:" + "a" * 64, "gpu@sha256:" + "b" * 64),
        ({"image": {"digest": "sha256:" + "a" * 64}, "decode": {"image": {"tag": "t"}}},
         "tandem-serve@sha256:" + "a" * 64, "tandem-serve:t"),
    ],
    ids=["ours", "of all", "of a parent chart", "nearer", "two digests", "a tag of one's own"],
)  # fmt: skip
def test_each_role_may_have_an_image_of_its_own(
    values: dict[str, Any], router: str, decode: str
) -> None:
    pods = pods_of(everything(values))
    images = {part: pod["spec"]["containers"][0]["image"] for part, pod in pods.items()}
    assert (images["router"], images["decode"]) == (router, decode)
    # No pod needs a second image to wait for the model.
    for part in ("router", "decode"):
        assert pods[part]["spec"]["initContainers"][0]["image"] == images[part]


def test_a_role_s_own_words_reach_its_pod_and_no_other() -> None:
    sidecar, first = {"name": "logs", "image": "logs:1"}, {"name": "tune", "image": "tools:1"}
    hook = {"exec": {"command": ["true"]}}
    told = {
        "extraArgs": ["--log-level=debug"],
        "extraContainers": [sidecar],
        "initContainers": [first],
        "lifecycle": {"preStop": hook},
        "terminationGracePeriodSeconds": 7200,
        "probes": {"liveness": {"failureThreshold": 30, "timeoutSeconds": 9}},
    }
    for part in ("router", "prefill", "decode"):
        before, after = pods_of(everything()), pods_of(everything({part: told}))
        assert [each for each in before if before[each] != after[each]] == [part]
        spec = after[part]["spec"]
        assert spec["containers"][1:] == [sidecar]
        assert spec["initContainers"][1:] == [first]
        assert spec["terminationGracePeriodSeconds"] == 7200
        main = spec["containers"][0]
        assert main["args"][-1] == "--log-level=debug"
        assert main["lifecycle"] == {"preStop": hook}
        probe = main["livenessProbe"]
        assert (probe["failureThreshold"], probe["timeoutSeconds"]) == (30, 9)
        assert probe["periodSeconds"] == 10, "as before"


def test_openshift_chooses_the_user_of_every_pod() -> None:
    chosen = ("runAsUser", "runAsGroup", "fsGroup")
    for pod in pods_of(everything(profile("openshift"))).values():
        spec = pod["spec"]
        containers = [*spec.get("initContainers", ()), *spec["containers"]]
        for told in (spec, *containers):
            assert not any(name in told.get("securityContext", {}) for name in chosen)


def test_devices_that_are_claimed_are_the_container_s() -> None:
    claim = {"name": "gpus", "resourceClaimTemplateName": "eight-gpus-and-cards"}
    told = {"workers": {"gpu": {"resource": ""}, "resourceClaims": [claim]}}
    pods = pods_of(everything(told))
    for part in ("prefill", "decode"):
        spec = pods[part]["spec"]
        assert spec["resourceClaims"] == [claim]
        resources = spec["containers"][0]["resources"]
        assert resources["claims"] == [{"name": "gpus"}]
        assert "nvidia.com/gpu" not in resources["limits"]
    assert "resourceClaims" not in pods["router"]["spec"]


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A chart that has this one among its own, under a condition."""
    folder = tmp_path / "platform"
    (folder / "charts").mkdir(parents=True)
    (folder / "charts" / "tandem").symlink_to(CHART)
    entry = {"name": "tandem", "version": "0.1.0", "condition": "tandem.enabled"}
    chart = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [entry]}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(chart))
    return folder


@pytest.mark.parametrize("enabled", [True, False])
def test_a_parent_chart_turns_it_on_and_off(parent: Path, enabled: bool) -> None:
    values = {"tandem": {"enabled": enabled, "keys": {"allowAnonymous": True}}}
    values["global"] = {"imageRegistry": "mirror"}
    with Chart.load(parent) as chart:
        files = chart.render(copy.deepcopy(values), name="demo", namespace="serving")
    assert any("mirror/tandem-serve" in text for text in files.values()) == enabled
    assert bool(files) == enabled
