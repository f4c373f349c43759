"""Schemas of the custom resources that the chart makes: the fields that it uses, and no others.

Written by hand from the public API references, for the versions that the chart names:

- LeaderWorkerSet, leaderworkerset.x-k8s.io/v1: LeaderWorkerSet API reference
- ScaledObject, keda.sh/v1alpha1: KEDA, ScaledObject specification and the Prometheus scaler
- PodMonitor, ServiceMonitor, PrometheusRule, monitoring.coreos.com/v1: Prometheus operator, API
- HTTPRoute, gateway.networking.k8s.io/v1: Gateway API specification
- InferencePool, inference.networking.k8s.io/v1: Gateway API inference extension
- Certificate, cert-manager.io/v1: cert-manager API reference
- Route, route.openshift.io/v1: OpenShift API reference

A field that is not here is refused: whoever adds one looks it up there. Pods in them are checked
with Kubernetes' own schemas (`test_manifests.py`).
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "minLength": 1}
TEXT: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
STRINGS: Schema = {"type": "object", "additionalProperties": TEXT}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(h|m|s|ms))+$"}
POD: Schema = {"type": "object", "required": ["spec"]}
"""Checked by itself."""


def at_least(number: int) -> Schema:
    """A whole number."""
    return {"type": "integer", "minimum": number}


def one_of(*values: str) -> Schema:
    """One of some words."""
    return {"enum": list(values)}


def listing(item: Schema) -> Schema:
    """A list of at least one."""
    return {"type": "array", "items": item, "minItems": 1}


def closed(required: dict[str, Schema], **optional: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {**required, **optional},
        "required": list(required),
    }


METADATA = closed({"name": NAME}, labels=STRINGS, annotations=STRINGS)
SELECTOR = closed({"matchLabels": STRINGS})


def resource(api_version: str, kind: str, spec: Schema) -> Schema:
    """A whole manifest."""
    return closed(
        {
            "apiVersion": {"const": api_version},
            "kind": {"const": kind},
            "metadata": METADATA,
            "spec": spec,
        }
    )


def leader_worker_set() -> Schema:
    """Groups of pods that live and die together."""
    rolling = closed({}, maxUnavailable=at_least(0), maxSurge=at_least(0), partition=at_least(0))
    template = closed(
        {"workerTemplate": POD, "size": at_least(1)},
        restartPolicy=one_of("RecreateGroupOnPodRestart", "None"),
    )
    spec = closed(
        {"leaderWorkerTemplate": template},
        replicas=at_least(0),
        startupPolicy=one_of("LeaderCreated", "LeaderReady"),
        rolloutStrategy=closed(
            {"type": one_of("RollingUpdate")}, rollingUpdateConfiguration=rolling
        ),
        networkConfig=closed({"subdomainPolicy": one_of("Shared", "UniquePerReplica")}),
    )
    return resource("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", spec)


def scaled_object() -> Schema:
    """KEDA scales a target by queries."""
    prometheus = closed(
        {"serverAddress": STRING, "query": STRING, "threshold": STRING}, authModes=STRING
    )
    authentication = closed(
        {"name": NAME}, kind=one_of("TriggerAuthentication", "ClusterTriggerAuthentication")
    )
    trigger = closed(
        {"type": one_of("prometheus"), "metadata": prometheus},
        name=STRING,
        metricType=one_of("AverageValue", "Value"),
        authenticationRef=authentication,
    )
    spec = closed(
        {"scaleTargetRef": closed({"name": NAME}, apiVersion=STRING, kind=STRING)},
        pollingInterval=at_least(1),
        minReplicaCount=at_least(0),
        maxReplicaCount=at_least(1),
        fallback=closed(
            {"failureThreshold": at_least(1), "replicas": at_least(0)},
            behavior=one_of("static", "currentReplicas", "currentReplicasIfHigher"),
        ),
        # `behavior` is Kubernetes' own, checked with the HorizontalPodAutoscaler's schema.
        advanced=closed(
            {"horizontalPodAutoscalerConfig": closed({"behavior": {"type": "object"}})}
        ),
        triggers=listing(trigger),
    )
    spec["required"] = ["scaleTargetRef", "triggers"]
    return resource("keda.sh/v1alpha1", "ScaledObject", spec)


def _scrape() -> dict[str, Schema]:
    key = closed({"name": NAME, "key": STRING})
    return {
        "path": STRING,
        "scheme": one_of("http", "https"),
        "interval": DURATION,
        "tlsConfig": closed({}, ca=closed({"secret": key}), serverName=STRING),
        "authorization": closed({}, credentials=key),
        "relabelings": listing(closed({"targetLabel": STRING, "replacement": STRING})),
    }


def pod_monitor() -> Schema:
    """Prometheus scrapes pods."""
    endpoint = closed({"port": STRING}, **_scrape())
    spec = closed({"selector": SELECTOR, "podMetricsEndpoints": listing(endpoint)})
    return resource("monitoring.coreos.com/v1", "PodMonitor", spec)


def service_monitor() -> Schema:
    """Prometheus scrapes what is behind a Service."""
    endpoint = closed({"port": STRING}, **_scrape())
    spec = closed({"selector": SELECTOR, "endpoints": listing(endpoint)})
    return resource("monitoring.coreos.com/v1", "ServiceMonitor", spec)


def prometheus_rule() -> Schema:
    """Alerts, and rules that record."""
    rule = closed(
        {"expr": STRING},
        alert=STRING,
        record=STRING,
        labels=STRINGS,
        annotations=STRINGS,
        keep_firing_for=DURATION,
        **{"for": DURATION},
    )
    group = closed({"name": STRING, "rules": listing(rule)}, interval=DURATION)
    return resource(
        "monitoring.coreos.com/v1", "PrometheusRule", closed({"groups": listing(group)})
    )


def http_route() -> Schema:
    """A gateway's way to a Service or a pool."""
    parent = closed({"name": NAME}, namespace=NAME, sectionName=STRING, group=STRING, kind=STRING)
    backend = closed({"name": NAME}, port=PORT, group=STRING, kind=STRING)
    path = closed({"type": one_of("PathPrefix", "Exact"), "value": STRING})
    rule = closed(
        {"backendRefs": listing(backend)},
        matches=listing(closed({"path": path})),
        timeouts=closed({"request": DURATION}),
    )
    spec = closed({"parentRefs": listing(parent), "rules": listing(rule)}, hostnames=listing(NAME))
    return resource("gateway.networking.k8s.io/v1", "HTTPRoute", spec)


def inference_pool() -> Schema:
    """Pods among which an endpoint picker chooses."""
    picker = closed(
        {"name": NAME, "port": closed({"number": PORT})},
        failureMode=one_of("FailOpen", "FailClose"),
    )
    spec = closed(
        {
            "selector": SELECTOR,
            "targetPorts": listing(closed({"number": PORT})),
            "endpointPickerRef": picker,
        }
    )
    return resource("inference.networking.k8s.io/v1", "InferencePool", spec)


def certificate() -> Schema:
    """What cert-manager makes a Secret from."""
    usages = one_of("digital signature", "key encipherment", "server auth", "client auth")
    issuer = closed({"name": NAME}, kind=one_of("Issuer", "ClusterIssuer"), group=STRING)
    key = closed(
        {"algorithm": one_of("RSA", "ECDSA", "Ed25519"), "size": at_least(256)},
        rotationPolicy=one_of("Never", "Always"),
    )
    name: Schema = {"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
    spec = closed(
        {"secretName": NAME, "issuerRef": issuer, "dnsNames": listing(name)},
        duration=DURATION,
        renewBefore=DURATION,
        usages=listing(usages),
        uris=listing(STRING),
        privateKey=key,
    )
    return resource("cert-manager.io/v1", "Certificate", spec)


def route() -> Schema:
    """OpenShift's way to a Service."""
    spec = closed(
        {"to": closed({"kind": one_of("Service"), "name": NAME})},
        host=NAME,
        port=closed({"targetPort": STRING}),
        tls=closed(
            {"termination": one_of("edge", "reencrypt", "passthrough")},
            insecureEdgeTerminationPolicy=one_of("None", "Allow", "Redirect"),
        ),
    )
    return resource("route.openshift.io/v1", "Route", spec)


def all_schemas() -> dict[str, Schema]:
    """By kind."""
    schemas = (
        leader_worker_set(),
        scaled_object(),
        pod_monitor(),
        service_monitor(),
        prometheus_rule(),
        http_route(),
        inference_pool(),
        certificate(),
        route(),
    )
    return {schema["properties"]["kind"]["const"]: schema for schema in schemas}
