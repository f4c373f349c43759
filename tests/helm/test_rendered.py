"""What the rendered objects are to each other: ports, names, graces, secrets, who reaches whom."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from runtime.config import ClusterConfig
from runtime.config.file import load_config, parse_config
from runtime.metrics.vllm_names import ROWS
from runtime.net.credentials import Credentials
from runtime.net.roles import URI, Role, role_secret
from tests.helm.rendering import (
    PROFILES,
    ROOT,
    Manifest,
    Rendered,
    merged,
    nested,
    pod_template,
    pod_templates,
    probe,
    profile,
    render,
)
from tests.runtime.exports import make_exports

H200 = ROOT / "deploy" / "configs" / "h200"
TLS = nested("tls", {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "x"}}})


@cache
def release(name: str) -> Rendered:
    return render(profile(name))


def containers(rendered: Rendered) -> list[tuple[str, Manifest, Manifest]]:
    """Name, pod and container of all workloads."""
    return [
        (name, pod["spec"], container)
        for name, pod in pod_templates(rendered).items()
        for container in pod["spec"]["containers"]
    ]


def container_of(rendered: Rendered, kind: str, name: str) -> Manifest:
    container: Manifest = pod_template(rendered.get(kind, name))["spec"]["containers"][0]
    return container


def flags(container: Manifest) -> dict[str, str]:
    pairs = (each.removeprefix("--").partition("=") for each in container["args"])
    return {name: value for name, _, value in pairs}


def config_of(rendered: Rendered) -> ClusterConfig:
    toml = rendered.get("ConfigMap", "demo-tandem-config")["data"]["config.toml"]
    return parse_config(tomllib.loads(toml))


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_holds_a_configuration(name: str) -> None:
    config = config_of(release(name))
    assert config.cluster.name == "demo-tandem"
    assert config.cluster.host == "0.0.0.0"


@pytest.mark.parametrize("name", ["ep16", "ep72"])
def test_profiles_are_the_configurations_of_the_same_name(name: str) -> None:
    """All but what pods change: addresses, the transport, and how many workers there are."""
    rendered, file = release(f"h200-{name}"), load_config(H200 / f"{name}.toml")
    config = config_of(rendered)
    assert config.model == file.model
    assert config.decode == file.decode
    assert config.prefill == dataclasses.replace(file.prefill, instances=1)
    keys_file = "/etc/tandem-keys/keys.toml"
    assert config.router == dataclasses.replace(file.router, keys_file=keys_file)
    prefill = rendered.get("StatefulSet", "demo-tandem-prefill")
    assert prefill["spec"]["replicas"] == file.prefill.instances
    groups = rendered.get("LeaderWorkerSet", "demo-tandem-decode")["spec"]
    assert groups["leaderWorkerTemplate"]["size"] * 8 == file.decode.dp


@pytest.mark.parametrize("name", PROFILES)
def test_no_container_has_rights_that_it_does_not_need(name: str) -> None:
    for _, pod, container in containers(release(name)):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"]["drop"] == ["ALL"]
        is_rdma = "rdma/ib" in container["resources"]["limits"]
        assert context["capabilities"].get("add", []) == (["IPC_LOCK"] if is_rdma else [])


@pytest.mark.parametrize("name", PROFILES)
def test_probes_and_services_name_ports_that_there_are(name: str) -> None:
    rendered = release(name)
    for _, _, container in containers(rendered):
        ports = {port["name"] for port in container.get("ports", [])}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            for way in ("httpGet", "tcpSocket"):
                if way in container.get(kind, {}):
                    assert container[kind][way]["port"] in ports
    for service in rendered.of_kind("Service"):
        selector = service["spec"]["selector"].items()
        chosen = [
            pod
            for pod in pod_templates(rendered).values()
            if selector <= pod["metadata"]["labels"].items()
        ]
        assert len(chosen) == 1, service["metadata"]["name"]
        names = {port["name"] for port in chosen[0]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


@pytest.mark.parametrize("name", PROFILES)
def test_kubernetes_waits_longer_than_a_drain_takes(name: str) -> None:
    rendered = release(name)
    for part, pod, container in containers(rendered):
        if part == "demo-tandem-test":
            continue
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        before = int(hook[1]) if hook else 0
        grace = int(flags(container)["grace"])
        assert pod["terminationGracePeriodSeconds"] >= before + grace + 30
        assert bool(hook) == part.endswith("router"), "only a router has to be forgotten first"


@pytest.mark.parametrize("name", PROFILES)
def test_workers_find_the_routers_also_before_these_are_ready(name: str) -> None:
    rendered = release(name)
    service = rendered.get("Service", "demo-tandem-routers")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"]
    address = f"demo-tandem-routers.serving.svc.cluster.local:{service['ports'][0]['port']}"
    assert service["ports"][0]["port"] == config_of(rendered).router.control_port
    for part, _, container in containers(rendered):
        if part.endswith(("prefill", "decode")):
            assert flags(container)["routers"] == f"dns+{address}"


def test_a_worker_of_one_host_is_named_after_its_pod() -> None:
    decode = container_of(release("cpu-demo"), "StatefulSet", "demo-tandem-decode")
    assert decode["command"] == ["tandem", "worker", "decode"]
    assert flags(decode) == {
        "config": "/etc/tandem/config.toml",
        "instance": "$(POD_NAME)",
        "routers": "dns+demo-tandem-routers.serving.svc.cluster.local:8100",
        "host": "0.0.0.0",
        "advertise": "$(POD_IP)",
        "port-base": "9000",
        "health-port": "8080",
        "grace": "60",
    }


def test_a_group_tells_its_hosts_who_they_are_and_where_they_meet() -> None:
    decode = container_of(release("h200-ep72"), "LeaderWorkerSet", "demo-tandem-decode")
    given = flags(decode)
    assert given["instance"] == "demo-tandem-decode-$(GROUP_INDEX)"
    assert (given["hosts"], given["host-index"]) == ("9", "$(HOST_INDEX)")
    leader = "demo-tandem-decode-$(GROUP_INDEX).demo-tandem-decode.serving.svc.cluster.local"
    assert given["rendezvous"] == f"{leader}:9301"
    assert 9301 in [port["containerPort"] for port in decode["ports"]]
    fields = {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"]
        for each in decode["env"]
        if "fieldRef" in each.get("valueFrom", {})
    }
    labels = "metadata.labels['leaderworkerset.sigs.k8s.io/{}']"
    assert fields["GROUP_INDEX"] == labels.format("group-index")
    assert fields["HOST_INDEX"] == labels.format("worker-index")


@pytest.mark.parametrize("name", PROFILES)
def test_variables_in_arguments_are_declared_before_they_are_used(name: str) -> None:
    for _, _, container in containers(release(name)):
        used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        assert used <= {each["name"] for each in container.get("env", [])}


def test_a_rank_has_a_gpu_and_a_card_and_those_that_serve_have_ports() -> None:
    rendered = release("h200-1p1d")
    for role, num_endpoints in (("prefill", 1), ("decode", 8)):
        container = container_of(rendered, "StatefulSet", f"demo-tandem-{role}")
        limits = container["resources"]["limits"]
        assert (limits["nvidia.com/gpu"], limits["rdma/ib"]) == ("8", "8")
        names = [port["name"] for port in container["ports"]]
        assert sum(each.startswith("metrics-") for each in names) == num_endpoints
        assert sum(each.startswith("kv-") for each in names) == 8
    router = container_of(rendered, "Deployment", "demo-tandem-router")
    assert "nvidia.com/gpu" not in router["resources"]["limits"]
    assert router["image"].endswith("-cpu")


def test_every_rank_that_serves_is_scraped() -> None:
    rendered = render(merged(profile("h200-ep16"), nested("monitoring.podMonitor.enabled", True)))
    for role, kind in (("prefill", "StatefulSet"), ("decode", "LeaderWorkerSet")):
        ports = container_of(rendered, kind, f"demo-tandem-{role}")["ports"]
        monitor = rendered.get("PodMonitor", f"demo-tandem-{role}")["spec"]
        scraped = [each["port"] for each in monitor["podMetricsEndpoints"]]
        assert scraped == [p["name"] for p in ports if p["name"].startswith("metrics-")]


def test_the_secret_is_drawn_anew_for_a_new_release_only(tmp_path: Path) -> None:
    secrets = [render().get("Secret", "demo-tandem-secret")["data"] for _ in range(2)]
    assert secrets[0] != secrets[1]
    assert {*secrets[0]} == {*ROLES}
    there = dict.fromkeys(ROLES, "b2xk") | {"decode-previous": "b2xkZXI="}
    call = 'tandem.secretData" (dict "key" "{role}" "live" .Values.global.live)'
    assert probe(tmp_path, call, {"data": there}) == there


ROLES = ("router", "prefill", "decode")


def told(data: dict[str, str]) -> dict[str, str]:
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def test_each_role_is_given_what_the_command_makes_for_it(tmp_path: Path) -> None:
    """Of one that was drawn for all roles once, so that both are seen."""
    call = 'tandem.secretData" (dict "key" "{role}" "live" .Values.global.live)'
    made = told(probe(tmp_path, call, {"data": {"secret": base64.b64encode(b"old").decode()}}))
    assert made.pop("secret") == "old"
    assert made == {role: role_secret("old", Role(role)) for role in ROLES}


def test_roles_of_a_new_release_can_call_one_another_and_cannot_be_one_another() -> None:
    rendered = render()
    data = told(rendered.get("Secret", "demo-tandem-secret")["data"])
    of = {Role(role): Credentials(secret=data[role], role=Role(role)) for role in ROLES}
    for caller, server in itertools.product(of, of):
        shown = of[caller].shown_to(server)
        assert of[server].roles_of(shown.encode()) == {caller}
    for role in ROLES:
        kind = "Deployment" if role == "router" else "StatefulSet"
        container = container_of(rendered, kind, f"demo-tandem-{role}")
        (given,) = [each for each in container["env"] if each["name"] == "TANDEM_SECRET"]
        assert given["valueFrom"]["secretKeyRef"]["key"] == role


def test_one_secret_for_all_pods_is_still_to_be_had() -> None:
    rendered = render({"secret": {"key": "secret", "previousKey": "before"}})
    (drawn,) = told(rendered.get("Secret", "demo-tandem-secret")["data"]).values()
    assert len(drawn) == 48
    container = container_of(rendered, "StatefulSet", "demo-tandem-decode")
    given = [one["valueFrom"] for one in container["env"] if one["name"].endswith("_SECRET")]
    found = [one["secretKeyRef"]["key"] for one in given]
    assert found == ["secret", "before"]


@pytest.mark.parametrize("existing", ["", "pem", "tandem-{role}"])
def test_each_role_has_a_certificate_that_names_it(existing: str) -> None:
    given = {"tls": {"enabled": True, "existingSecret": existing}}
    rendered = render(given if existing else TLS)
    for role in ROLES:
        kind = "Deployment" if role == "router" else "StatefulSet"
        volumes = pod_template(rendered.get(kind, f"demo-tandem-{role}"))["spec"]["volumes"]
        (mounted,) = [one["secret"]["secretName"] for one in volumes if one["name"] == "tls"]
        if existing:
            assert mounted == existing.replace("{role}", role)
            continue
        spec = rendered.get("Certificate", f"demo-tandem-{role}")["spec"]
        assert spec["secretName"] == mounted
        assert spec["uris"] == [f"{URI}{role}"]


@pytest.mark.parametrize(
    ("before", "now", "running", "kept"),
    [
        (None, 2, None, 2),
        ("2", 2, 5, 5),
        ("2", 2, 0, 0),
        ("2", 3, 5, 3),
        (None, 2, 5, 2),
    ],
    ids=["new", "scaled by hand", "scaled to none", "changed in the values", "of somebody else"],
)
def test_a_number_that_was_scaled_by_hand_stays_over_upgrades(
    tmp_path: Path, before: str | None, now: int, running: int | None, kept: int
) -> None:
    live: dict[str, Any] = {}
    if running is not None:
        annotations = {} if before is None else {"annotations": {"tandem/replicas": before}}
        live = {"metadata": {"name": "x", **annotations}, "spec": {"replicas": running}}
    call = f'tandem.replicas" (dict "live" .Values.global.live "replicas" {now})'
    assert probe(tmp_path, call, live) == kept


def test_a_scaler_of_kubernetes_decides_alone() -> None:
    scaled = render(nested("decode.autoscaling.mode", "hpa"))
    assert "replicas" not in scaled.get("StatefulSet", "demo-tandem-decode")["spec"]
    assert scaled.get("StatefulSet", "demo-tandem-prefill")["spec"]["replicas"] == 1
    target = scaled.get("HorizontalPodAutoscaler", "demo-tandem-decode")["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "demo-tandem-decode"
    }  # fmt: skip


def test_scalers_ask_for_metrics_that_there_are() -> None:
    exported = {
        role: {family.name for family in registry.collect()}
        for role, registry in make_exports().registries.items()
    }
    keda, hpa = ({"autoscaling": {"mode": mode}} for mode in ("keda", "hpa"))
    triggers = [
        trigger["metadata"]["query"]
        for each in render({"prefill": keda, "decode": keda}).of_kind("ScaledObject")
        for trigger in each["spec"]["triggers"]
    ]
    asked = re.findall(r"\b(pd_(prefill|decode)_\w+)", " ".join(triggers))
    assert len(triggers) == 4
    assert len(asked) == 6
    assert all(name in exported[role] for name, role in asked)
    assert 'pod=~"demo-tandem-prefill-[0-9].*"' in triggers[0]
    for role in ("prefill", "decode"):
        scaler = render({role: hpa}).get("HorizontalPodAutoscaler", f"demo-tandem-{role}")
        names = {each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]}
        # As the adapter's rules in docs/use/kubernetes.md rename them.
        renamed = {f"vllm_{row.name}" for row in ROWS[role]}
        assert names <= exported[role] | renamed


def test_with_tls_everything_is_called_by_a_name_of_the_certificate() -> None:
    rendered = render(merged(profile("h200-ep16"), TLS))
    names = [name for one in rendered.of_kind("Certificate") for name in one["spec"]["dnsNames"]]
    domain = "serving.svc.cluster.local"
    for role, kind in (("prefill", "StatefulSet"), ("decode", "LeaderWorkerSet")):
        container = container_of(rendered, kind, f"demo-tandem-{role}")
        host, _, rest = flags(container)["advertise"].partition(".")
        assert host == "$(POD_NAME)"
        assert f"*.{rest}" in names
    assert {f"demo-tandem-router.{domain}", f"demo-tandem-routers.{domain}", "localhost"} <= {
        *names
    }
    config = config_of(rendered)
    assert (config.tls.mode, config.tls.ca) == ("files", "/etc/tandem-tls/ca.crt")
    assert config.cluster.advertise == "localhost", "as a router's processes call each other"
    test_pod = rendered.get("Pod", "demo-tandem-test")["spec"]["containers"][0]
    assert test_pod["args"][0].startswith("https://demo-tandem-router.")
    router = container_of(rendered, "Deployment", "demo-tandem-router")
    assert router["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"


def allows(policy: Manifest, source: dict[str, str], port: int) -> bool:
    """Whether pods of the same namespace with these labels get in."""
    for rule in policy["spec"]["ingress"]:
        ports = rule.get("ports")
        if ports and not any(p["port"] <= port <= p.get("endPort", p["port"]) for p in ports):
            continue
        peers = rule.get("from")
        if peers is None or any(chooses(peer.get("podSelector"), source) for peer in peers):
            return True
    return False


def chooses(selector: Manifest | None, labels: dict[str, str]) -> bool:
    if selector is None or not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    return all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


@pytest.mark.parametrize("name", ["cpu-demo", "h200-ep16"])
def test_strangers_reach_http_and_nothing_else(name: str) -> None:
    rendered = release(name)
    own = {part: pod["metadata"]["labels"] for part, pod in pod_templates(rendered).items()}
    stranger = {"app": "else"}
    other_release = {**own["demo-tandem-decode"], "app.kubernetes.io/instance": "other"}
    router = rendered.get("NetworkPolicy", "demo-tandem-router")
    workers = rendered.get("NetworkPolicy", "demo-tandem-workers")
    assert chooses(router["spec"]["podSelector"], own["demo-tandem-router"])
    for role in ("prefill", "decode"):
        assert chooses(workers["spec"]["podSelector"], own[f"demo-tandem-{role}"])
        assert allows(router, own[f"demo-tandem-{role}"], 8100)
        assert allows(workers, own[f"demo-tandem-{role}"], 45678), "data ports, collectives"
    assert allows(router, stranger, 8000)
    assert not allows(router, stranger, 8100)
    assert allows(workers, own["demo-tandem-router"], 9000)
    assert allows(workers, own["demo-tandem-router"], 9310)
    assert not allows(workers, own["demo-tandem-router"], 9200)
    for port in (9000, 9100, 9200, 9301, 45678):
        assert not allows(workers, stranger, port)
        assert not allows(workers, other_release, port)


def test_of_http_those_are_let_in_that_are_named_and_the_test_and_the_monitoring() -> None:
    client = {"app": "chat"}
    rendered = render(nested("networkPolicy.clients", [{"podSelector": {"matchLabels": client}}]))
    policy = rendered.get("NetworkPolicy", "demo-tandem-router")
    assert allows(policy, client, 8000)
    assert allows(policy, rendered.get("Pod", "demo-tandem-test")["metadata"]["labels"], 8000)
    assert not allows(policy, {"app": "else"}, 8000)
    assert not allows(policy, client, 8100)


def test_a_change_of_the_configuration_restarts_what_reads_it() -> None:
    before, after = render(), render(nested("config.decode.max_num_seqs", 8))
    scaled = render(nested("decode.replicas", 3))
    for name, pod in pod_templates(before).items():
        if name == "demo-tandem-test":
            continue
        checksum = pod["metadata"]["annotations"]["checksum/config"]
        others = [
            pod_templates(each)[name]["metadata"]["annotations"]["checksum/config"]
            for each in (after, scaled)
        ]
        assert checksum != others[0]
        assert checksum == others[1], "more workers restart nobody"


def test_notes_say_what_to_try() -> None:
    notes = release("cpu-demo").notes
    assert "helm -n serving test demo" in notes
    assert "scale statefulset/demo-tandem-decode --replicas=2" in notes
    assert "scale leaderworkerset/demo-tandem-decode" in release("h200-ep16").notes
    assert "WARNING" in render(nested("networkPolicy.enabled", False)).notes


def folders_of(pod: Manifest) -> dict[str, str]:
    """Where a pod's only container finds each of its volumes."""
    (container,) = pod["spec"]["containers"]
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


def test_keys_are_where_routers_look_for_them_and_nowhere_else() -> None:
    keys = {"existingSecret": "tenants", "file": "api.toml", "testKey": "one"}
    rendered = render({"keys": {**keys, "allowAnonymous": False}})
    router = config_of(rendered).router
    assert router.keys_file == "/etc/tandem-keys/api.toml"
    assert not router.allow_anonymous
    pods = pod_templates(rendered)
    assert [part for part, pod in pods.items() if "keys" in folders_of(pod)] == [
        "demo-tandem-router"
    ]
    pod = pods["demo-tandem-router"]
    assert folders_of(pod)["keys"] == str(Path(router.keys_file).parent)
    (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == "keys"]
    assert volume["secret"]["secretName"] == "tenants"
    assert volume["secret"]["items"] == [{"key": "api.toml", "path": "api.toml"}]
    (container,) = rendered.get("Pod", "demo-tandem-test")["spec"]["containers"]
    (variable,) = container["env"]
    assert variable["name"] == "TANDEM_API_KEY"
    assert variable["valueFrom"]["secretKeyRef"] == {
        "name": "tenants", "key": "one", "optional": True,
    }  # fmt: skip
    assert "needs a key" in rendered.notes


def test_prometheus_shows_the_key_that_metrics_need() -> None:
    keys = {"existingSecret": "tenants", "allowAnonymous": False}
    monitored = {"monitoring": {"serviceMonitor": {"enabled": True}}}
    for entry in ("", "prometheus"):
        values = merged(monitored, {"keys": {**keys, "scrapeKey": entry}})
        rendered = render(merged(profile("cpu-demo"), values))
        (endpoint,) = rendered.get("ServiceMonitor", "demo-tandem-router")["spec"]["endpoints"]
        shown = {"credentials": {"name": "tenants", "key": "prometheus"}}
        assert endpoint.get("authorization") == (shown if entry else None)
        assert config_of(rendered).router.metrics_access == ("key" if entry else "open")


def test_a_release_without_keys_says_so() -> None:
    rendered = release("cpu-demo")
    assert config_of(rendered).router.allow_anonymous
    assert "asks for no key" in rendered.notes
    assert not any("keys" in folders_of(pod) for pod in pod_templates(rendered).values())
