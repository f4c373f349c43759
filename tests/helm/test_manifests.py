"""Every manifest of every profile, and of many combinations of values, is one Kubernetes takes."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from helm_python.chart import lint
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.helm.custom_resources import all_schemas
from tests.helm.rendering import (
    CHART,
    PROFILES,
    Manifest,
    Rendered,
    merged,
    nested,
    pod_templates,
    profile,
    render,
)

NUM_VERSIONS = 6
VERSIONS = sorted(
    {
        kubernetes_validate.utils.major_minor(each)
        for each in kubernetes_validate.utils.all_versions()
    },
    key=lambda version: tuple(map(int, version.split("."))),
)[-NUM_VERSIONS:]
PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}]
EVERYTHING: dict[str, Any] = {
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "hosts": [
            {"host": "llm.example"},
            {"host": "b.example", "paths": [{"path": "/v1", "pathType": "Exact"}]},
        ],
        "tls": [{"secretName": "edge", "hosts": ["llm.example"]}],
    },
    "route": {"enabled": True, "host": "llm.example"},
    "httpRoute": {
        "enabled": True,
        "parentRefs": [{"name": "edge", "namespace": "gateways"}],
        "hostnames": ["llm.example"],
        "toInferencePool": True,
    },
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    "monitoring": {
        "labels": {"release": "prometheus"},
        "podMonitor": {"enabled": True},
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "runbookBaseUrl": "https://docs.example/runbooks.html",
        "dashboards": {"enabled": True, "annotations": {"folder": "Tandem"}},
    },
    "networkPolicy": {"clients": PEERS},
    "image": {"pullSecrets": ["registry"]},
    "podLabels": {"team": "serving"},
    "podAnnotations": {"example/owner": "serving"},
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {}},
        "{apiVersion: v1, kind: ConfigMap, metadata: {name: '{{ .Release.Name }}-b'}}",
    ],
}
TLS: dict[str, Any] = {
    "tls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "internal"}}}
}
PLACED: dict[str, Any] = {
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "Exists"}]}]}}},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone",
                                   "whenUnsatisfiable": "DoNotSchedule"}],
    "priorityClassName": "serving",
    "env": [{"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}],
    "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
}  # fmt: skip
ROLE: dict[str, Any] = {
    **PLACED,
    "runtimeClassName": "nvidia",
    "schedulerName": "volcano",
    "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "cache": {"hostPath": "/var/lib/tandem-cache"},
}
OF_A_ROLE: dict[str, Any] = {
    "image": {"registry": "registry.example", "tag": "other", "pullPolicy": "Always"},
    "extraArgs": ["--log-level=debug"],
    "extraContainers": [{"name": "logs", "image": "logs:1"}],
    "initContainers": [{"name": "sysctl", "image": "tools:1", "command": ["true"]}],
    "lifecycle": {"postStart": {"exec": {"command": ["true"]}}},
    "terminationGracePeriodSeconds": 7200,
    "probes": {"liveness": {"failureThreshold": 30}, "startup": {"initialDelaySeconds": 5}},
}
HPA_OF_ONE_METRIC = nested(
    "decode.autoscaling",
    {
        "mode": "hpa",
        "hpa": {"metrics": [{"type": "Resource", "resource": {
            "name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}}]},
    },
)  # fmt: skip
COMBINATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "everything": ("cpu-demo", EVERYTHING),
    "everything encrypted": ("cpu-demo", merged(EVERYTHING, TLS)),
    "groups encrypted": ("h200-ep16", merged(EVERYTHING, TLS)),
    "hpa": ("cpu-demo", merged(
        nested("prefill.autoscaling.mode", "hpa"), nested("decode.autoscaling.mode", "hpa"))),
    "hpa of a metric of one's own": ("cpu-demo", HPA_OF_ONE_METRIC),
    "hpa of groups": ("h200-ep72", nested("decode.autoscaling.mode", "hpa")),
    "keda": ("cpu-demo", merged(
        nested("prefill.autoscaling.mode", "keda"), nested("decode.autoscaling.mode", "keda"))),
    "keda of groups": ("h200-ep16", nested("decode.autoscaling.mode", "keda")),
    "placed": ("h200-ep16", {"router": PLACED, "prefill": ROLE, "decode": ROLE}),
    "one topology": ("h200-ep72", nested("decode.exclusiveTopology", "rack")),
    "a claim of the chart's": ("h200-1p1d", {"model": {
        "source": "claim", "existingClaim": "",
        "claim": {"storageClassName": "nfs", "volumeName": "weights", "size": "700Gi"}}}),
    "a folder of the nodes": ("h200-1p1d", {"model": {
        "source": "hostPath", "existingClaim": "", "hostPath": "/data/models"}}),
    "secrets that exist": ("cpu-demo", {
        "secret": {"existing": "mine"}, "tls": {"enabled": True, "existingSecret": "pem"}}),
    "little of it": ("cpu-demo", {
        "serviceAccount": {"create": False}, "networkPolicy": {"enabled": False},
        "router": {"pdb": {"enabled": False}}, "prefill": {"pdb": {"enabled": False}},
        "decode": {"pdb": {"maxUnavailable": "25%"}}}),
    "a load balancer": ("cpu-demo", {"router": {"replicas": 3, "service": {
        "type": "LoadBalancer", "port": 80, "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "annotations": {"example/internal": "true"}}}}),
    "several models": ("h200-ep16", {"router": {
        "models": {"llama-8b": {"path": "/weights/llama-8b", "aliases": ["small"]}},
        "extraVolumes": [{"name": "llama", "persistentVolumeClaim": {"claimName": "llama"}}],
        "extraVolumeMounts": [{"name": "llama", "mountPath": "/weights"}]}}),
    "joined and encrypted": ("cpu-demo", merged(TLS, {
        "join": {"release": "other"}, "monitoring": {"podMonitor": {"enabled": True}}})),
    "IPv6": ("cpu-demo", {"listen": "::"}),
    "both families": ("cpu-demo", {
        "listen": "::", "ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"]}),
    "a model of the hub": ("h200-ep16", {"model": {
        "source": "claim", "existingClaim": "", "path": "",
        "download": {"from": "deepseek-ai/DeepSeek-R1@main", "tokenSecret": {"name": "hub"}}}}),
    "a copy on every node": ("h200-ep16", {"model": {
        "source": "hostPath", "hostPath": "/data/models", "path": "",
        "download": {"from": "s3://weights/DeepSeek-R1", "envFrom": [{"secretRef": {"name": "s3"}}]}
    }}),
    "an image of the model": ("h200-1p1d", {"model": {
        "source": "image", "path": "/models", "image": {"reference": "registry/deepseek:r1"}}}),
    "the nodes' network": ("h200-ep16", {
        "hostNetwork": True, "hostIPC": True, "networkPolicy": {"nodeCIDRs": ["10.0.0.0/16"]}}),
    "everything of a role": ("h200-ep16", {"router": OF_A_ROLE, "workers": OF_A_ROLE}),
    "claimed devices": ("h200-ep16", {"workers": {"gpu": {"resource": ""}, "resourceClaims": [
        {"name": "gpus", "resourceClaimTemplateName": "eight-gpus"}]}}),
    "updates in parts": ("h200-ep16", {
        "workers": {"updateStrategy": {"partition": 1, "maxUnavailable": 2}},
        "router": {"updateStrategy": {"type": "Recreate"}}}),
    "updates by hand": ("cpu-demo", {"workers": {"updateStrategy": {"type": "OnDelete"}}}),
    "nothing runs": ("cpu-demo", {"workers": {"replicas": 0}, "router": {"replicas": 0}}),
    "from zero": ("cpu-demo", {"workers": {"autoscaling": {
        "mode": "keda", "minReplicas": 0,
        "keda": {"authenticationRef": "thanos", "authModes": "bearer"}}}}),
    "routers by load": ("cpu-demo", nested("router.autoscaling.mode", "hpa")),
    "a balancer of one's own": ("cpu-demo", {"router": {"service": {
        "type": "LoadBalancer", "nodePort": 30080, "loadBalancerClass": "example/inner",
        "externalTrafficPolicy": "Local"}}}),
    "names": ("cpu-demo", {"fullnameOverride": "a-name-that-is-much-longer-than-any-should-be"}),
}  # fmt: skip


@cache
def rendered(name: str) -> Rendered:
    """A profile, or a combination."""
    if name in PROFILES:
        return render(profile(name))
    base, changes = COMBINATIONS[name]
    return render(merged(profile(base), changes))


NAMES = (*PROFILES, *COMBINATIONS)


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_lint_without_a_warning(name: str) -> None:
    report = lint(CHART, profile(name), strict=True)
    worse_than_information = [each for each in report["messages"] if each["severity"] > 1]
    assert not worse_than_information
    assert not report["errors"]


def test_the_defaults_lint_and_render() -> None:
    assert not lint(CHART, {}, strict=True)["errors"]
    assert render().of_kind("StatefulSet")


def _own(manifest: Manifest) -> bool:
    return manifest["kind"] not in all_schemas()


@cache
def kubernetes_schema(version: str, api_version: str, kind: str) -> Draft202012Validator:
    """The strict schema of a kind: what ``kubernetes_validate.validate`` reads anew each time."""
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    name = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    contents = kubernetes_validate.utils.schema_contents
    schema = Resource.from_contents(contents(f"{folder}/{kind.lower()}-{name}.json", version))
    definitions = Resource.from_contents(contents(f"{folder}/_definitions.json", version))
    registry: Registry[Any] = definitions @ (schema @ Registry())
    return Draft202012Validator(schema.contents, registry=registry)


@cache
def check_by_kubernetes(manifest: str) -> None:
    """Raise where a version refuses it; most manifests of the combinations are the same."""
    content = json.loads(manifest)
    for version in VERSIONS:
        kubernetes_schema(version, content["apiVersion"], content["kind"]).validate(content)


@pytest.mark.parametrize("name", NAMES)
def test_kubernetes_takes_every_manifest(name: str) -> None:
    release = rendered(name)
    native = [each for each in (*release.manifests, *release.hooks) if _own(each)]
    assert native
    pods = [{"apiVersion": "v1", "kind": "Pod", **pod} for pod in pod_templates(release).values()]
    scaled = [
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "spec": {
                "scaleTargetRef": each["spec"]["scaleTargetRef"],
                "maxReplicas": each["spec"]["maxReplicaCount"],
                **each["spec"]["advanced"]["horizontalPodAutoscalerConfig"],
            },
        }
        for each in release.of_kind("ScaledObject")
    ]
    for manifest in (*native, *pods, *scaled):
        check_by_kubernetes(json.dumps(manifest, sort_keys=True))


@pytest.mark.parametrize("name", NAMES)
def test_custom_resources_fit_their_schemas(name: str) -> None:
    for manifest in rendered(name).manifests:
        if not _own(manifest):
            jsonschema.validate(manifest, all_schemas()[manifest["kind"]])


def test_every_custom_resource_is_made_by_some_combination() -> None:
    made = {each["kind"] for name in NAMES for each in rendered(name).manifests}
    assert set(all_schemas()) <= made


def test_unknown_kinds_and_fields_would_be_noticed() -> None:
    service = rendered("cpu-demo").of_kind("Service")[0]
    wrong = merged(service, {"spec": {"sessionAfinity": "None"}})
    with pytest.raises(jsonschema.ValidationError):
        check_by_kubernetes(json.dumps(wrong))
    group = rendered("h200-ep16").of_kind("LeaderWorkerSet")[0]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(group, {"spec": {"replica": 1}}), all_schemas()[group["kind"]])


@pytest.mark.parametrize("name", NAMES)
def test_names_are_unlike_one_another_and_short(name: str) -> None:
    release = rendered(name)
    names = [(each["kind"], each["metadata"]["name"]) for each in release.manifests]
    assert len(names) == len(set(names))
    # A pod of a group adds "-999-64" to the longest, and a label takes 63 characters.
    assert max(len(own) for _, own in names) <= 63 - len("-999-64")
