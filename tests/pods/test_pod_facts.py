"""What a container is told and given, as a kubelet puts it together."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from tests.pods.environment import PodFacts, command_of, environment_of, expand
from tests.pods.manifests import ManifestError, Manifests
from tests.pods.volumes import lay_out

FACTS = PodFacts(
    name="decode-3",
    namespace="serving",
    uid="7",
    ip="10.0.0.9",
    host_ip="10.0.0.1",
    node="node-0",
    labels={"example.io/index": "3"},
)
OBJECTS = Manifests.of(
    [
        {"kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"a.toml": "x = 1"}},
        {
            "kind": "Secret",
            "metadata": {"name": "hidden"},
            "data": {"secret": base64.b64encode(b"s3").decode()},
            "stringData": {"plain": "p"},
        },
    ]
)


def env(*entries: dict[str, Any], **container: Any) -> dict[str, str]:
    return environment_of({"env": list(entries), **container}, FACTS, OBJECTS)


def from_secret(key: str, name: str = "hidden", **more: object) -> dict[str, Any]:
    return {"name": "S", "valueFrom": {"secretKeyRef": {"name": name, "key": key, **more}}}


def from_field(path: str) -> dict[str, Any]:
    return {"name": "F", "valueFrom": {"fieldRef": {"fieldPath": path}}}


def test_a_container_is_told_of_its_pod() -> None:
    assert env(from_field("metadata.name")) == {"F": "decode-3"}
    assert env(from_field("status.podIP")) == {"F": "10.0.0.9"}
    assert env(from_field("metadata.labels['example.io/index']")) == {"F": "3"}
    with pytest.raises(ManifestError, match=r"metadata\.nam"):
        env(from_field("metadata.nam"))


def test_what_a_secret_lacks_is_an_error_unless_it_is_optional() -> None:
    assert env(from_secret("secret"))["S"] == "s3"
    assert env(from_secret("plain"))["S"] == "p"
    with pytest.raises(ManifestError, match="key 'none' of Secret 'hidden' not found"):
        env(from_secret("none"))
    with pytest.raises(ManifestError, match="Secret 'missing'"):
        env(from_secret("secret", "missing"))
    assert env(from_secret("none", optional=True)) == {}


def test_a_number_is_no_variable() -> None:
    with pytest.raises(ManifestError, match="8 is no text"):
        env({"name": "N", "value": 8})


def test_variables_stand_in_command_lines_and_in_later_ones() -> None:
    variables = env(
        from_field("metadata.name"),
        {"name": "FULL", "value": "$(F).svc:$(PORT)"},
        {"name": "PORT", "value": "1"},
    )
    assert variables["FULL"] == "decode-3.svc:$(PORT)", "only those before it"
    container = {"command": ["tandem", "worker"], "args": ["--instance=$(F)", "$$(F)"]}
    assert command_of(container, variables, ["image"]) == [
        *("tandem", "worker", "--instance=decode-3", "$(F)"),
    ]
    assert command_of({"args": ["x"]}, variables, ["image"]) == ["image", "x"]
    assert expand("$(NONE)$", {}) == "$(NONE)$"


def test_all_of_a_config_map(tmp_path: Path) -> None:
    found = env(envFrom=[{"prefix": "P_", "configMapRef": {"name": "settings"}}])
    assert found == {"P_a.toml": "x = 1"}


def pod(*volumes: dict[str, Any], **security: int) -> dict[str, Any]:
    return {"volumes": list(volumes), "securityContext": security}


def test_volumes_have_the_files_of_what_they_name(tmp_path: Path) -> None:
    items = [{"key": "secret", "path": "deep/file"}]
    volumes = lay_out(
        pod(
            {"name": "config", "configMap": {"name": "settings"}},
            {"name": "keys", "secret": {"secretName": "hidden", "items": items}},
            {"name": "tmp", "emptyDir": {}},
        ),
        tmp_path,
        OBJECTS,
        FACTS,
    )
    assert (volumes["config"] / "a.toml").read_text() == "x = 1"
    assert [path.name for path in volumes["keys"].rglob("*")] == ["deep", "file"]
    assert (volumes["keys"] / "deep" / "file").read_bytes() == b"s3"
    assert list(volumes["tmp"].iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_the_group_of_a_pod_may_read_its_secrets(tmp_path: Path) -> None:
    secret = {"name": "keys", "secret": {"secretName": "hidden", "defaultMode": 0o400}}
    volumes = lay_out(pod(secret, fsGroup=10001), tmp_path, OBJECTS, FACTS)
    found = (volumes["keys"] / "secret").stat()
    assert (found.st_gid, found.st_mode & 0o777) == (10001, 0o440)


@pytest.mark.parametrize(
    ("volume", "problem"),
    [
        ({"configMap": {"name": "none"}}, "ConfigMap 'none' not found"),
        ({"secret": {"secretName": "none"}}, "Secret 'none' not found"),
        (
            {"secret": {"secretName": "hidden", "items": [{"key": "no", "path": "x"}]}},
            "Secret 'hidden' has no key 'no'",
        ),
        ({"hostPath": {"path": "/nowhere/at/all"}}, "no such folder"),
    ],
)
def test_a_volume_of_nothing_is_an_error(
    tmp_path: Path, volume: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ManifestError, match=problem):
        lay_out(pod({"name": "v", **volume}), tmp_path, OBJECTS, FACTS)
