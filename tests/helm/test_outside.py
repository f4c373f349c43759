"""What others see of a release: alerts, dashboards, scalers, Services, gateways, its network."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import yaml

from tests.helm.rendering import ROOT, Rendered, merged, nested, profile, render
from tests.helm.test_rendered import allows, container_of

WATCHED = nested(
    "monitoring",
    {kind: {"enabled": True} for kind in ("podMonitor", "serviceMonitor", "dashboards")}
    | {"prometheusRule": {"enabled": True, "disabled": ["TandemKeyLimited"]}}
    | {"runbookBaseUrl": "https://docs.example/runbooks.html"},
)


@cache
def watched(name: str = "demo") -> Rendered:
    return render(WATCHED, name=name)


def dashboards(rendered: Rendered) -> list[dict[str, Any]]:
    found = [
        each for each in rendered.of_kind("ConfigMap") if "-dashboard-" in each["metadata"]["name"]
    ]
    return [json.loads(text) for each in found for text in each["data"].values()]


def test_series_say_of_which_release_they_are() -> None:
    rendered = watched()
    (router,) = rendered.of_kind("ServiceMonitor")
    endpoints = [*router["spec"]["endpoints"]]
    for monitor in rendered.of_kind("PodMonitor"):
        endpoints += monitor["spec"]["podMetricsEndpoints"]
    assert len(endpoints) == 3
    for endpoint in endpoints:
        assert endpoint["relabelings"] == [{"targetLabel": "release", "replacement": "demo"}]


def test_alerts_are_those_of_the_file_with_links_that_can_be_followed() -> None:
    text = (ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text(encoding="utf-8")
    ours = {
        rule["alert"]: rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]
    }
    (made,) = watched().of_kind("PrometheusRule")
    rules = {rule["alert"]: rule for group in made["spec"]["groups"] for rule in group["rules"]}
    assert set(ours) - set(rules) == {"TandemKeyLimited"}
    for name, rule in rules.items():
        assert rule["expr"] == ours[name]["expr"]
        url = rule["annotations"]["runbook_url"]
        assert url == f"https://docs.example/runbooks.html#{name.lower()}"


def test_dashboards_of_two_releases_do_not_collide_and_show_their_own() -> None:
    mine, other = dashboards(watched()), dashboards(watched("other"))
    assert len(mine) == len(other) == 6
    uids = [each["uid"] for each in mine + other]
    titles = [each["title"] for each in mine + other]
    assert len({*uids}) == len({*titles}) == 12
    assert max(map(len, uids)) <= 40, "as Grafana has it"
    for each in mine:
        assert each["title"].endswith(" (serving/demo)")
        text = json.dumps(each)
        assert text.count('namespace=~\\"$namespace\\",release=\\"demo\\"') > 0
        assert text.count('namespace=~\\"$namespace\\"') == text.count('\\",release=\\"demo\\"')


def test_without_the_chart_s_own_monitors_nobody_says_whose_series_are() -> None:
    """Somebody else scrapes them: a filter by release would find nothing."""
    rendered = render(nested("monitoring.dashboards.enabled", True))
    assert not any("release=" in json.dumps(each) for each in dashboards(rendered))


def test_from_zero_a_router_is_reached_and_says_what_waits() -> None:
    keda = {"autoscaling": {"mode": "keda", "minReplicas": 0}}
    rendered = render({"decode": keda})
    router = container_of(rendered, "Deployment", "demo-tandem-router")
    assert router["readinessProbe"]["httpGet"]["path"] == "/health"
    (scaled,) = rendered.of_kind("ScaledObject")
    assert scaled["spec"]["minReplicaCount"] == 0
    (first,) = [each for each in scaled["spec"]["triggers"] if each["name"] == "first"]
    assert (
        'pd_router_requests_waiting{namespace="serving",pod=~"demo-tandem-router-.*"}'
        in (first["metadata"]["query"])
    )
    joined = render({"decode": keda, "join": {"release": "front"}})
    (first,) = [
        e for e in joined.of_kind("ScaledObject")[0]["spec"]["triggers"] if e["name"] == "first"
    ]
    assert "front-tandem-router-" in first["metadata"]["query"]
    one = render({"decode": merged(keda, nested("autoscaling.minReplicas", 1))})
    ready = container_of(one, "Deployment", "demo-tandem-router")["readinessProbe"]
    assert ready["httpGet"]["path"] == "/ready"
    assert len(one.of_kind("ScaledObject")[0]["spec"]["triggers"]) == 2


def test_queries_of_a_scaler_may_have_to_say_who_asks() -> None:
    keda = {"authenticationRef": "thanos", "authModes": "bearer"}
    rendered = render({"workers": {"autoscaling": {"mode": "keda", "keda": keda}}})
    triggers = [t for each in rendered.of_kind("ScaledObject") for t in each["spec"]["triggers"]]
    assert len(triggers) == 4
    for trigger in triggers:
        assert trigger["authenticationRef"] == {"name": "thanos", "kind": "TriggerAuthentication"}
        assert trigger["metadata"]["authModes"] == "bearer"


def test_routers_may_be_scaled_by_their_load() -> None:
    rendered = render(nested("router.autoscaling", {"mode": "hpa", "maxReplicas": 9}))
    spec = rendered.get("HorizontalPodAutoscaler", "demo-tandem-router")["spec"]
    assert spec["scaleTargetRef"]["kind"] == "Deployment"
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 9)
    assert spec["metrics"][0]["resource"]["target"]["averageUtilization"] == 70
    assert "replicas" not in rendered.get("Deployment", "demo-tandem-router")["spec"]


def test_all_services_have_the_families_that_are_wanted() -> None:
    rendered = render({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"]})
    services = rendered.of_kind("Service")
    assert len(services) == 4
    for service in services:
        assert service["spec"]["ipFamilyPolicy"] == "RequireDualStack"
        assert service["spec"]["ipFamilies"] == ["IPv6", "IPv4"]


def test_an_ingress_has_many_hosts_and_paths_and_their_names_are_certified() -> None:
    hosts = [
        {"host": "a.example"},
        {"host": "b.example", "paths": [{"path": "/v1"}, {"path": "/x"}]},
    ]
    manager = {"enabled": True, "issuerRef": {"name": "x"}}
    tls = {"enabled": True, "certManager": manager}
    rendered = render({"ingress": {"enabled": True, "hosts": hosts}, "tls": tls})
    (ingress,) = rendered.of_kind("Ingress")
    rules = {r["host"]: [p["path"] for p in r["http"]["paths"]] for r in ingress["spec"]["rules"]}
    assert rules == {"a.example": ["/"], "b.example": ["/v1", "/x"]}
    certificate = rendered.get("Certificate", "demo-tandem-router")
    assert {"a.example", "b.example"} <= {*certificate["spec"]["dnsNames"]}


def egress(rendered: Rendered, policy: str) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = rendered.get("NetworkPolicy", policy)["spec"]["egress"]
    return rules


OF_MONITORING = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "otel"}}}]
OF_OURS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "serving"}}}]


@pytest.mark.parametrize(
    ("endpoint", "port", "to"),
    [
        ("http://collector.otel:4317", 4317, OF_MONITORING),
        ("http://collector.otel.svc.cluster.local:4318/v1/traces", 4318, OF_MONITORING),
        ("http://collector:4317", 4317, OF_OURS),
        ("https://traces.example.com", 443, None),
        ("http://10.1.2.3:4317", 4317, [{"ipBlock": {"cidr": "10.1.2.3/32"}}]),
        ("http://[fd00::1]:4317", 4317, [{"ipBlock": {"cidr": "fd00::1/128"}}]),
        ("collector.otel:4317", 4317, OF_MONITORING),
    ],
)
def test_traces_get_out_to_their_collector(
    endpoint: str, port: int, to: list[dict[str, Any]] | None
) -> None:
    rendered = render(nested("config.tracing.endpoint", endpoint))
    rule = {"ports": [{"port": port, "protocol": "TCP"}], **({} if to is None else {"to": to})}
    for policy in ("demo-tandem-router", "demo-tandem-workers"):
        assert rule in egress(rendered, policy)
        assert rule not in egress(render(), policy)


def test_who_fetches_the_model_gets_out_and_no_other() -> None:
    download = {"source": "hostPath", "hostPath": "/models", "download": {"from": "o/m"}}
    fetched = {"ports": [{"port": 443, "protocol": "TCP"}]}
    once = {"source": "claim", "download": {"from": "o/m"}}
    for policy in ("demo-tandem-router", "demo-tandem-workers"):
        assert fetched in egress(render({"model": download}), policy)
        # A Job's pod is under neither policy.
        assert fetched not in egress(render({"model": once}), policy)


def test_pods_of_the_nodes_network_are_let_in_by_their_nodes_addresses() -> None:
    nodes = {"hostNetwork": True, "networkPolicy": {"nodeCIDRs": ["10.0.0.0/16"]}}
    block = {"ipBlock": {"cidr": "10.0.0.0/16"}}
    rendered = render(merged(profile("cpu-demo"), nodes))
    for policy in ("demo-tandem-router", "demo-tandem-workers"):
        spec = rendered.get("NetworkPolicy", policy)["spec"]
        assert any(block in rule.get("from", []) for rule in spec["ingress"])
        assert any(block in rule.get("to", []) for rule in spec["egress"])


def test_further_ports_may_be_opened() -> None:
    rule = {"ports": [{"port": 9999}], "from": [{"podSelector": {"matchLabels": {"app": "x"}}}]}
    rendered = render(nested("networkPolicy.extraIngress", [rule]))
    for policy in ("demo-tandem-router", "demo-tandem-workers"):
        assert allows(rendered.get("NetworkPolicy", policy), {"app": "x"}, 9999)
        assert not allows(rendered.get("NetworkPolicy", policy), {"app": "y"}, 9999)


def test_further_objects_may_speak_of_the_release() -> None:
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-x'}\n"
    table = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "{{ .Release.Name }}-y"}}
    rendered = render({"extraObjects": [text, table]})
    assert rendered.get("ConfigMap", "demo-x")
    assert rendered.get("Secret", "demo-y")
