"""Several models behind one release's routers: their file, and releases of workers that join."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from helm_python.errors import HelmError

from router.model import load_served_models
from router.models_file import read_models
from runtime.config import ClusterConfig
from runtime.config.file import parse_config
from tests.helm.rendering import Rendered, merged, nested, pod_templates, profile, render
from tests.helm.test_rendered import allows, chooses, container_of, flags, folders_of
from tests.integration.conftest import MODEL_DIR
from tests.router.conftest import write_model

OF_VOLUME: dict[str, Any] = {
    "model": {"source": "existingClaim", "existingClaim": "weights", "path": "/models/deepseek"}
}
SMALL = {"path": "/models/llama-8b", "aliases": ["small"], "max_model_len": 8192}
SEVERAL = merged(OF_VOLUME, nested("router.models", {"llama-8b": SMALL}))
JOINED = merged(
    OF_VOLUME,
    {
        "model": {"path": "/models/llama-8b"},
        "config": {"model": {"name": "llama-8b"}},
        "join": {"release": "demo"},
        "keys": {},
    },
)
TLS = nested("tls", {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "x"}}})
DOMAIN = "serving.svc.cluster.local"


def joined(*changes: dict[str, Any]) -> Rendered:
    """A release of workers alone, beside `demo`."""
    return render(merged(JOINED, *changes), name="llama")


def config_of(rendered: Rendered, name: str) -> ClusterConfig:
    toml = rendered.get("ConfigMap", f"{name}-tandem-config")["data"]["config.toml"]
    return parse_config(tomllib.loads(toml))


def labels_of(rendered: Rendered) -> dict[str, dict[str, str]]:
    return {name: pod["metadata"]["labels"] for name, pod in pod_templates(rendered).items()}


def test_the_file_of_models_is_where_the_router_looks_for_it(tmp_path: Path) -> None:
    names = {"llama-8b": SMALL, 'org/a "b" <c> & d.1': {"path": "/models/x"}}
    rendered = render(merged(OF_VOLUME, nested("router.models", names)))
    data = rendered.get("ConfigMap", "demo-tandem-config")["data"]
    file = tmp_path / "models.toml"
    file.write_text(data["models.toml"])
    entries = {entry.name: entry for entry in read_models(file)}
    assert set(entries) == set(names)
    small = entries["llama-8b"]
    assert (small.path, small.aliases, small.max_model_len) == (
        "/models/llama-8b", ("small",), 8192,
    )  # fmt: skip
    where = Path(config_of(rendered, "demo").router.models_file)
    assert where.name in data
    assert folders_of(pod_templates(rendered)["demo-tandem-router"])["config"] == str(where.parent)


def test_a_router_serves_what_the_chart_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_model(folder)
    volume = {"name": "tiny", "persistentVolumeClaim": {"claimName": "tiny"}}
    mount = {"name": "tiny", "mountPath": str(tmp_path), "readOnly": True}
    router = {
        "models": {"tiny": {"path": str(folder), "aliases": ["t"]}},
        "extraVolumes": [volume],
        "extraVolumeMounts": [mount],
    }
    rendered = render({"model": {"bundledPath": str(MODEL_DIR)}, "router": router})
    pod = pod_templates(rendered)["demo-tandem-router"]
    assert volume in pod["spec"]["volumes"]
    assert mount in pod["spec"]["containers"][0]["volumeMounts"]
    file = tmp_path / "models.toml"
    file.write_text(rendered.get("ConfigMap", "demo-tandem-config")["data"]["models.toml"])
    config = config_of(rendered, "demo")
    config = dataclasses.replace(
        config, router=dataclasses.replace(config.router, models_file=str(file))
    )
    assert [model.names for model in load_served_models(config)] == [
        (MODEL_DIR.name,), ("tiny", "t"),
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["/data/x", "/data/x/", "/data/x/y"])
def test_a_checkpoint_may_be_a_volume_of_its_own(path: str) -> None:
    router = {
        "models": {"x": {"path": path}},
        "extraVolumes": [{"name": "x", "hostPath": {"path": "/srv/x"}}],
        "extraVolumeMounts": [{"name": "x", "mountPath": "/data/x", "readOnly": True}],
    }
    rendered = render(merged(OF_VOLUME, {"router": router}))
    assert path in rendered.get("ConfigMap", "demo-tandem-config")["data"]["models.toml"]


def test_a_release_of_one_model_has_nothing_of_it() -> None:
    rendered = render(OF_VOLUME)
    data = rendered.get("ConfigMap", "demo-tandem-config")["data"]
    assert list(data) == ["config.toml"]
    assert not config_of(rendered, "demo").router.models_file
    for pod in pod_templates(rendered).values():
        assert "checksum/models" not in pod["metadata"]["annotations"]
        assert "tandem/joins" not in pod["metadata"]["labels"]
    stranger = labels_of(joined())["llama-tandem-decode"]
    assert not allows(rendered.get("NetworkPolicy", "demo-tandem-router"), stranger, 8100)


def test_another_model_restarts_the_routers_and_no_worker() -> None:
    two = nested("router.models", {"qwen": {"path": "/models/qwen"}})
    before, after = (pod_templates(render(each)) for each in (SEVERAL, merged(SEVERAL, two)))
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"demo-tandem-router"}


@pytest.mark.parametrize(
    ("entry", "place"),
    [
        ({}, "/router/models/x"),
        ({"path": ""}, "/router/models/x/path"),
        ({"path": "models/x"}, "/router/models/x/path"),
        ({"path": "/models/x", "alias": "y"}, "/router/models/x"),
        ({"path": "/models/x", "aliases": "y"}, "/router/models/x/aliases"),
        ({"path": "/models/x", "aliases": [""]}, "/router/models/x/aliases/0"),
        ({"path": "/models/x", "max_model_len": -1}, "/router/models/x/max_model_len"),
        ({"path": "/models/x", "tool_parser": "lama"}, "/router/models/x/tool_parser"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_refused_with_its_path(entry: dict[str, Any], place: str) -> None:
    with pytest.raises(HelmError) as caught:
        render(merged(OF_VOLUME, nested("router.models", {"x": entry})))
    assert place in str(caught.value)


def test_more_models_than_a_router_takes_are_refused() -> None:
    models = {f"m{number}": {"path": "/models/x"} for number in range(65)}
    with pytest.raises(HelmError, match="/router/models"):
        render(merged(OF_VOLUME, nested("router.models", models)))


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (nested("router.models", {"x": {"path": "/data/x"}}), 'router.models.x.path = "/data/x"'),
    (merged(OF_VOLUME, nested("router.models", {"x": {"path": "/data/x"}})),
     'router.models.x.path = "/data/x"'),
    (merged(SEVERAL, nested("router.models", {"deepseek": {"path": "/models/x"}})),
     'router.models.deepseek = "deepseek"'),
    (merged(SEVERAL, nested("config.model.aliases", "default, small")),
     'router.models.llama-8b = "small"'),
    (merged(SEVERAL, nested("router.models", {"x": {"path": "/models/x", "aliases": ["small"]}})),
     'router.models.x = "small"'),
    ({"join": {"fullname": "x"}}, 'join.fullname = "x"'),
    (nested("join.release", "demo"), 'join.release = "demo": is this release'),
    (merged(SEVERAL, nested("join.release", "other")), "router.models"),
    (nested("join.release", "other") | {"keys": {"existingSecret": "x"}}, "keys.existingSecret"),
    (nested("test.keySecret", "x"), 'test.keySecret = "x"'),
    (merged(nested("join.release", "other"), nested("ingress.enabled", True)), "ingress.enabled"),
    (merged(nested("join.release", "other"), nested("monitoring.serviceMonitor.enabled", True)),
     "monitoring.serviceMonitor.enabled"),
    (nested("join.release", "other") | {"httpRoute": {"enabled": True, "parentRefs": [{}]}},
     "httpRoute.enabled"),
    (nested("join.release", "o") | {
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "x"}}},
     "inferencePool.enabled"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), CONTRADICTIONS, ids=lambda each: str(each)[:40])
def test_what_cannot_be_together_is_refused_with_the_fix(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(HelmError) as caught:
        render(values)
    assert message in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_a_release_that_joins_has_workers_and_nothing_of_a_router() -> None:
    rendered = joined()
    names = {each["metadata"]["name"] for each in (*rendered.manifests, *rendered.hooks)}
    of_routers = ("-router", "-routers", "-secret")
    assert not [name for name in names if name.endswith(of_routers)]
    pods = {f"llama-tandem-{part}" for part in ("prefill", "decode", "test")}
    assert set(pod_templates(rendered)) == pods
    for role in ("prefill", "decode"):
        container = container_of(rendered, "StatefulSet", f"llama-tandem-{role}")
        assert flags(container)["routers"] == f"dns+demo-tandem-routers.{DOMAIN}:8100"
        assert flags(container)["instance"] == "$(POD_NAME)"
    config = config_of(rendered, "llama")
    assert (config.model.name, config.model.path) == ("llama-8b", "/models/llama-8b")
    assert "demo-tandem-router." in rendered.notes
    assert "helm -n serving test llama" in rendered.notes


def test_each_release_has_its_own_model_proven_at_the_routers() -> None:
    address = f"http://demo-tandem-router.{DOMAIN}:8000"
    names = {"demo": (render(SEVERAL), "deepseek"), "llama": (joined(), "llama-8b")}
    for release, (rendered, model) in names.items():
        (container,) = pod_templates(rendered)[f"{release}-tandem-test"]["spec"]["containers"]
        assert container["args"][:2] == [address, f"--model={model}"]
        assert "env" not in container
    with_key = joined({"test": {"keySecret": "of-llama"}})
    (container,) = pod_templates(with_key)["llama-tandem-test"]["spec"]["containers"]
    (variable,) = container["env"]
    assert variable["name"] == "TANDEM_API_KEY"
    wanted = {"name": "of-llama", "key": "testKey", "optional": True}
    assert variable["valueFrom"]["secretKeyRef"] == wanted


def test_tests_of_those_who_join_reach_http_where_clients_are_chosen() -> None:
    clients = {"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "x"}}}]}}
    policy = render(merged(SEVERAL, clients)).get("NetworkPolicy", "demo-tandem-router")
    own = labels_of(joined())
    assert allows(policy, own["llama-tandem-test"], 8000)
    assert not allows(policy, own["llama-tandem-test"], 8100), "it registers nobody"
    assert not allows(policy, own["llama-tandem-decode"], 8000)
    elsewhere = labels_of(joined({"join": {"release": "third"}}))
    assert not allows(policy, elsewhere["llama-tandem-test"], 8000)
    alone = render(merged(OF_VOLUME, clients)).get("NetworkPolicy", "demo-tandem-router")
    assert not allows(alone, own["llama-tandem-test"], 8000)


@pytest.mark.parametrize(
    ("join", "routers", "secret"),
    [
        ({"release": "demo"}, "demo-tandem-routers", "demo-tandem-secret"),
        ({"release": "tandem"}, "tandem-routers", "tandem-secret"),
        ({"release": "demo", "fullname": "front"}, "front-routers", "front-secret"),
    ],
)
def test_the_routers_and_the_secret_are_those_of_the_other_release(
    join: dict[str, str], routers: str, secret: str
) -> None:
    """As that release calls them."""
    rendered = joined({"join": join})
    other = render({**SEVERAL, "fullnameOverride": join.get("fullname", "")}, name=join["release"])
    assert other.get("Service", routers)
    assert other.get("Secret", secret)
    for role in ("prefill", "decode"):
        container = container_of(rendered, "StatefulSet", f"llama-tandem-{role}")
        assert flags(container)["routers"] == f"dns+{routers}.{DOMAIN}:8100"
        found = [
            each["valueFrom"]["secretKeyRef"]
            for each in container["env"]
            if each["name"].endswith("_SECRET")
        ]
        assert [each["name"] for each in found] == [secret, secret]
        assert [each["key"] for each in found] == [role, f"{role}-previous"]
    own = joined({"join": join, "secret": {"existing": "shared"}})
    container = container_of(own, "StatefulSet", "llama-tandem-decode")
    assert container["env"][2]["valueFrom"]["secretKeyRef"]["name"] == "shared"


def test_those_who_join_and_the_routers_reach_each_other_and_the_models_do_not() -> None:
    several, other = render(SEVERAL), joined()
    ours, theirs = labels_of(several), labels_of(other)
    router = several.get("NetworkPolicy", "demo-tandem-router")
    workers = other.get("NetworkPolicy", "llama-tandem-workers")
    first = several.get("NetworkPolicy", "demo-tandem-workers")
    elsewhere = labels_of(joined({"join": {"release": "third"}}))
    for role in ("prefill", "decode"):
        own = theirs[f"llama-tandem-{role}"]
        assert chooses(workers["spec"]["podSelector"], own)
        assert allows(router, own, 8100)
        assert allows(workers, own, 45678), "data ports, collectives"
        assert not allows(router, elsewhere[f"llama-tandem-{role}"], 8100)
        assert allows(router, ours[f"demo-tandem-{role}"], 8100)
        assert not allows(first, own, 9000)
        assert not allows(workers, ours[f"demo-tandem-{role}"], 9000)
    from_router = ours["demo-tandem-router"]
    assert allows(workers, from_router, 9000)
    assert allows(workers, from_router, 9310)
    assert not allows(workers, from_router, 9200)
    assert not allows(workers, {**from_router, "app.kubernetes.io/instance": "third"}, 9000)
    assert reaches(router, theirs["llama-tandem-decode"])
    assert reaches(workers, from_router)
    assert not reaches(workers, ours["demo-tandem-decode"])
    assert not reaches(router, elsewhere["llama-tandem-decode"])


def reaches(policy: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether pods that ``policy`` holds may call those with ``labels``."""
    peers = [peer for rule in policy["spec"]["egress"] for peer in rule.get("to", [])]
    return any(chooses(peer.get("podSelector"), labels) for peer in peers)


def test_the_label_of_those_who_join_is_no_selector_of_their_workload() -> None:
    """A selector cannot change, and pods' labels alone are what policies read."""
    for role in ("prefill", "decode"):
        spec = joined().get("StatefulSet", f"llama-tandem-{role}")["spec"]
        assert spec["template"]["metadata"]["labels"]["tandem/joins"] == "demo"
        assert "tandem/joins" not in spec["selector"]["matchLabels"]


def test_with_tls_a_release_that_joins_has_a_certificate_of_its_workers() -> None:
    other = joined(TLS)
    found = {each["metadata"]["name"]: each["spec"] for each in other.of_kind("Certificate")}
    assert {name: spec["dnsNames"] for name, spec in found.items()} == {
        f"llama-tandem-{role}": ["localhost", f"*.llama-tandem-{role}.{DOMAIN}"]
        for role in ("prefill", "decode")
    }
    container = container_of(other, "StatefulSet", "llama-tandem-decode")
    assert flags(container)["advertise"] == f"$(POD_NAME).llama-tandem-decode.{DOMAIN}"
    routers = flags(container)["routers"].removeprefix("dns+").partition(":")[0]
    theirs = render(merged(SEVERAL, TLS)).get("Certificate", "demo-tandem-router")
    assert routers in theirs["spec"]["dnsNames"]
    assert config_of(other, "llama").tls.mode == "files"
    assert folders_of(pod_templates(other)["llama-tandem-decode"])["tls"] == "/etc/tandem-tls"


def test_a_group_of_hosts_joins_as_well() -> None:
    values = merged(profile("h200-ep16"), {"join": {"release": "demo"}})
    values["keys"] = {}  # the profile's are those of HTTP
    rendered = render(values, name="big")
    decode = container_of(rendered, "LeaderWorkerSet", "big-tandem-decode")
    assert flags(decode)["routers"] == f"dns+demo-tandem-routers.{DOMAIN}:8100"
    pod = pod_templates(rendered)["big-tandem-decode"]
    assert pod["metadata"]["labels"]["tandem/joins"] == "demo"
