"""values.yaml says what every value means, the schema knows each, and wrong ones are refused."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import attrgetter, getitem
from typing import Any

import pytest
import yaml
from helm_python.chart import Chart
from helm_python.errors import HelmError

from runtime.config import ClusterConfig
from runtime.config.file import parse_config
from scripts import chart_files
from tests.helm.rendering import CHART, PROFILES, ROOT, merged, nested, profile, render

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
VALUES_TEXT = (CHART / "values.yaml").read_text(encoding="utf-8")
VALUES = yaml.safe_load(VALUES_TEXT)
OF_PODS = tuple(SCHEMA["definitions"]["pod"]["properties"])
PARTS = ("router", "workers", "test", "model.download")
"""Each takes what may be told to every pod, which stands in the values once."""
NOT_OURS = (
    "podSecurityContext",
    "containerSecurityContext",
    "monitoring.dashboards.labels",
    "route.annotations",
)
"""Maps whose keys belong to Kubernetes or to others."""


ROLES = ("prefill", "decode")
"""Their keys are those of `workers`."""
NOT_EVERYWHERE = {"cluster.ray_address", "router.instances"}
"""Fields that a configuration may lack."""


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in values.items():
        own = f"{path}.{key}" if path else key
        if (
            isinstance(value, Mapping)
            and value
            and own not in NOT_OURS
            and "resources" not in own.lower()
        ):
            yield from leaves(value, own)
        else:
            yield own


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a reference, or the first part of several, stands for."""
    while "$ref" in schema or "allOf" in schema:
        reference = schema["$ref"] if "$ref" in schema else schema["allOf"][0]["$ref"]
        schema = reduce(getitem, reference.removeprefix("#/").split("/"), SCHEMA)
    return schema


def value_at(path: str) -> Any:
    """The default of a value; None: there is none."""
    found: Any = VALUES
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def schema_leaves(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    properties = resolved(schema).get("properties")
    is_empty = bool(path) and value_at(path) == {}
    if not properties or is_empty or "resources" in path.lower():
        yield path
        return
    for key, value in properties.items():
        yield from schema_leaves(value, f"{path}.{key}" if path else key)


def test_every_value_has_a_comment() -> None:
    silent, path, commented = [], [], False
    for line in VALUES_TEXT.splitlines():
        key = re.match(r"( *)([\w/]+):(.*)", line)
        if key is None:
            commented = line.lstrip().startswith("#")
            continue
        path = [*path[: len(key[1]) // 2], key[2]]
        own = ".".join(path)
        if own in leaves(VALUES) and not commented:
            silent.append(own)
        commented = False
    assert not silent


def test_the_values_that_the_documentation_names_exist() -> None:
    text = (ROOT / "docs" / "use" / "kubernetes.md").read_text(encoding="utf-8")
    named = re.findall(rf"(?:`|--set )((?:{'|'.join(VALUES)})(?:\.\w+)+)", text)
    assert len(named) > 30
    of_pods = {key: VALUES[key] for key in (*OF_PODS, "image")}
    values = VALUES | {part: VALUES[part] | of_pods for part in ("router", "workers", "test")}
    values |= dict.fromkeys(ROLES, values["workers"])
    values["model"] = VALUES["model"] | {"download": VALUES["model"]["download"] | of_pods}
    for path in {*named} - {"tls.crt", "tls.key"}:
        found: Any = values
        for key in path.split("."):
            is_field = key == path.rpartition(".")[2] and key.islower() and found is not values
            if is_field and key not in found:
                assert hasattr(getattr(ClusterConfig(), path.partition(".")[0]), key), path
                break
            assert key in found, path
            found = found[key]


def test_the_schema_knows_the_values_and_no_others() -> None:
    of_parts = {f"{part}.{key}" for part in PARTS for key in OF_PODS}
    known = set(schema_leaves(SCHEMA))
    assert known >= of_parts
    known -= of_parts | {path for path in known if path.startswith("global")}
    assert known == set(leaves(VALUES))
    properties = SCHEMA["properties"]
    assert all(resolved(properties[role]) is resolved(properties["workers"]) for role in ROLES)


def test_a_role_s_own_value_wins_over_that_of_all_workers_also_where_it_is_nothing() -> None:
    common = {"replicas": 3, "pdb": {"enabled": True}, "nodeSelector": {"pool": "gpu"}}
    own = {"replicas": 2, "pdb": {"enabled": False}, "nodeSelector": {"zone": "a"}, "env": []}
    env = [{"name": "X", "value": "1"}]
    rendered = render({"workers": {**common, "env": env}, "decode": own})
    of = {role: rendered.get("StatefulSet", f"demo-tandem-{role}")["spec"] for role in ROLES}
    assert [of[role]["replicas"] for role in ROLES] == [3, 2]
    pods = {role: of[role]["template"]["spec"] for role in ROLES}
    assert pods["prefill"]["nodeSelector"] == {"pool": "gpu"}
    assert pods["decode"]["nodeSelector"] == {"pool": "gpu", "zone": "a"}
    names = {role: [e["name"] for e in pods[role]["containers"][0]["env"]] for role in ROLES}
    assert ("X" in names["prefill"], "X" in names["decode"]) == (True, False)
    budgets = {each["metadata"]["name"] for each in rendered.of_kind("PodDisruptionBudget")}
    assert budgets == {"demo-tandem-router", "demo-tandem-prefill"}


def test_the_schema_takes_the_defaults_and_the_profiles() -> None:
    with Chart.load(CHART) as chart:
        chart.validate_schema({})
        for name in PROFILES:
            chart.validate_schema(profile(name))


def test_generated_files_are_current() -> None:
    stale = [str(path.relative_to(CHART)) for path in chart_files.stale_files()]
    assert not stale, f"python scripts/chart_files.py: {stale}"


def test_the_schema_of_config_tells_what_the_configuration_refuses() -> None:
    schema = chart_files.config_schema()
    sections = schema["properties"]
    assert isinstance(sections, dict)
    decode = sections["decode"]["properties"]
    assert decode["dp"] == {"type": "integer", "minimum": 1}
    zero_or_more = {"type": "integer", "minimum": 0}  # 0 is a choice
    assert decode["num_blocks"] == {"anyOf": [zero_or_more, {"enum": ["auto"]}]}
    drafts = decode["num_speculative_tokens"]["anyOf"]
    assert drafts == [zero_or_more, {"enum": ["auto", "default"]}]
    assert decode["device"] == {"enum": ["cpu", "cuda"]}
    assert sections["kv_transfer"]["properties"]["faults"] == {"type": "string"}
    assert "instances" not in decode
    assert "secret" not in sections["cluster"]["properties"]


def test_fields_of_the_charts_own_exist() -> None:
    config = ClusterConfig()
    for section, names in chart_files.CHARTS_OWN.items():
        for name in {f"{section}.{name}" for name in names} - NOT_EVERYWHERE:
            assert attrgetter(name)(config) is not None, name


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("decode.replicas", -1, "/decode/replicas"),
        ("decode.hostNetwork", "yes", "/decode/hostNetwork"),
        ("decode.podSecurity", {}, "/decode"),
        ("router.probes.liveness.failures", 9, "/router/probes/liveness"),
        ("router.image.name", "x", "/router/image"),
        ("router.lifecycle.preStart", {}, "/router/lifecycle"),
        ("test.toleration", [], "/test"),
        ("model.download.from", "deepseek", "/model/download/from"),
        ("model.download.form", "org/x", "/model/download"),
        ("networkPolicy.nodeCIDRs", ["10.0.0.1"], "/networkPolicy/nodeCIDRs/0"),
        ("ingress.hosts", [{"name": "x"}], "/ingress/hosts/0"),
        ("dnsPolicy", "Cluster", "/dnsPolicy"),
        ("monitoring.runbookBaseUrl", "docs", "/monitoring/runbookBaseUrl"),
        ("decode.replicas", "three", "/decode/replicas"),
        ("decode.replica", 2, "/decode"),
        ("prefill.hosts", 2, "/prefill/hosts"),
        ("workers.hosts", 2, "/workers/hosts"),
        ("workers.replica", 2, "/workers"),
        ("prefill.ports.base", 80, "/prefill/ports/base"),
        ("router.ports.http", 99999, "/router/ports/http"),
        ("router.service.type", "Cluster", "/router/service/type"),
        ("decode.autoscaling.mode", "vpa", "/decode/autoscaling/mode"),
        ("decode.autoscaling.kvTarget", 80, "/decode/autoscaling/kvTarget"),
        ("decode.shm.sizeLimit", "64 GB", "/decode/shm/sizeLimit"),
        ("decode.drainSeconds", 0, "/decode/drainSeconds"),
        ("decode.pdb.maxUnavailable", 0, "/decode/pdb/maxUnavailable"),
        ("model.source", "s3", "/model/source"),
        ("model.path", "models/x", "/model/path"),
        ("image.digest", "latest", "/image/digest"),
        ("networkPolicy.enabled", "yes", "/networkPolicy/enabled"),
        ("tls.certManager.duration", "1y", "/tls/certManager/duration"),
        ("config.decode.dpp", 2, "/config/decode"),
        ("config.decode.dp", 0, "/config/decode/dp"),
        ("config.prefill.device", "gpu", "/config/prefill/device"),
        ("config.router.port", 80, "/config/router"),
        ("config.tiers", {"name": "max"}, "/config/tiers"),
        ("config.tiers", [{"order": 1}], "/config/tiers/0"),
        ("config.tiers", [{"name": "max", "share": -1}], "/config/tiers/0/share"),
        ("config.router.allow_anonymous", True, "/config/router"),
        ("keys.file", "etc/keys.toml", "/keys/file"),
        ("config.cluster.secret", "x", "/config/cluster"),
        ("replicas", 2, "at ''"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_its_path(path: str, value: object, place: str) -> None:
    with pytest.raises(HelmError) as caught:
        render(nested(path, value))
    assert place in str(caught.value)


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (nested("model.source", "existingClaim"), 'model.path = "": model.source is existingClaim'),
    ({"model": {"source": "existingClaim", "path": "/models/x"}}, "model.existingClaim"),
    ({"model": {"source": "hostPath", "path": "/models/x"}}, "model.hostPath"),
    ({"model": {"source": "existingClaim", "path": "/data/x"}}, 'model.path = "/data/x": is not'),
    (nested("keys.allowAnonymous", False), 'keys.existingSecret = "": whoever reaches HTTP'),
    ({"keys": {}}, 'keys.existingSecret = ""'),
    ({"keys": {"existingSecret": "x", "allowAnonymous": True}}, "keys.allowAnonymous = true"),
    ({"keys": {"scrapeKey": "one", "allowAnonymous": True}}, 'keys.scrapeKey = "one"'),
    (nested("tls.enabled", True), "tls.existingSecret"),
    (nested("tls.certManager", {"enabled": True, "issuerRef": {"name": "x"}}), "tls.enabled"),
    ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "issuerRef.name"),
    (nested("model.source", "claim"), "model.source = claim: nothing fills the new claim"),
    ({"model": {"source": "claim", "download": {"from": "o/m"},
                "claim": {"accessModes": ["ReadOnlyMany"]}}}, "model.claim.accessModes"),
    ({"model": {"source": "claim", "path": "/models", "download": {"from": "o/m"}}},
     'model.path = "/models": what is fetched'),
    (nested("model.download.from", "o/m"), 'model.download.from = "o/m": model.source is bundled'),
    ({"model": {"source": "image", "path": "/models"}}, "model.image.reference"),
    (nested("enabled", False), "enabled = false"),
    (nested("decode.hostNetwork", True), "decode.hostNetwork = true"),
    (nested("router.hostNetwork", True), "router.hostNetwork = true"),
    (nested("decode.terminationGracePeriodSeconds", 5), "decode.terminationGracePeriodSeconds = 5"),
    (merged(nested("config.decode.device", "cuda"), nested("decode.gpu.resource", "")),
     "decode.gpu.resource"),
    (merged(nested("decode.hosts", 2), nested("config.decode.dp", 2),
            nested("decode.updateStrategy.type", "OnDelete")), "decode.updateStrategy.type"),
    (nested("decode.autoscaling", {"mode": "hpa", "minReplicas": 0}), "minReplicas = 0"),
    (nested("route", {"enabled": True, "termination": "reencrypt"}), "route.termination"),
    (nested("monitoring.prometheusRule", {"enabled": True, "disabled": ["Tandem"]}),
     'monitoring.prometheusRule.disabled = "Tandem": there is no such alert'),
    (merged(nested("decode.hosts", 3), nested("config.decode.dp", 8)), "decode.hosts = 3: the 8"),
    (nested("config.prefill", {"tp": 2, "dp": 2}), "config.prefill.dp = 2"),
    (nested("decode.autoscaling", {"minReplicas": 9}), "decode.autoscaling.minReplicas = 9"),
    (nested("inferencePool.enabled", True), "inferencePool.endpointPicker.name"),
    (nested("httpRoute.enabled", True), "httpRoute.parentRefs"),
    (nested("httpRoute", {"enabled": True, "parentRefs": [{"name": "x"}], "toInferencePool": True}),
     "httpRoute.toInferencePool"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), CONTRADICTIONS, ids=lambda each: str(each)[:40])
def test_values_that_contradict_each_other_are_refused_with_the_fix(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(HelmError) as caught:
        render(values)
    assert message in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_what_the_chart_writes_is_a_configuration() -> None:
    values = {
        "config": {
            "router": {
                "queue_timeout_s": 30,
                "max_queue_bytes": 268435456,
                "policy": "round-robin",
            },
            "decode": {"enable_prefix_caching": False, "gpu_memory_fraction": 0.5},
            "model": {"name": 'a "quoted" <name> & more'},
            "tiers": [
                {"name": "max", "ttft_ms": 1000, "share": 0.5, "open": True},
                {"name": "base", "order": 1, "default": True},
            ],
        }
    }
    toml = render(values).get("ConfigMap", "demo-tandem-config")["data"]["config.toml"]
    config = parse_config(tomllib.loads(toml))
    assert [tier.name for tier in config.tiers] == ["max", "base"]
    assert config.tiers[0].share == 0.5
    assert [tier.open for tier in config.tiers] == [True, False]
    assert config.tiers[1].default
    assert config.router.queue_timeout_s == 30.0
    assert config.router.max_queue_bytes == 268435456
    assert config.decode.gpu_memory_fraction == 0.5
    assert not config.decode.enable_prefix_caching
    assert config.model.name == 'a "quoted" <name> & more'
    assert config.cluster.host == "0.0.0.0"
