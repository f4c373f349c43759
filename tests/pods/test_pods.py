"""Pods of small shell scripts: the harness does to them what Kubernetes does to pods."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pods.cluster import PodCluster
from tests.pods.manifests import Manifests
from tests.pods.network import why_not
from tests.waiting import wait_until

REASON = why_not()
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(REASON), reason=REASON or "can be run")]

SERVE = "exec python -m http.server 8080 --directory /tmp"
SECURITY = {"runAsNonRoot": True, "runAsUser": 10001, "fsGroup": 10001}


def container(script: str, **more: Any) -> dict[str, Any]:
    return {
        "name": "main",
        "command": ["sh", "-c", script],
        "ports": [{"name": "http", "containerPort": 8080}],
        "securityContext": {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        **more,
    }


def template(app: str, one: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"app": app}},
        "spec": {
            "securityContext": SECURITY,
            "containers": [one],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
            # A first process that has no handler for it does not heed SIGTERM.
            "terminationGracePeriodSeconds": 1,
            **spec,
        },
    }


def stateful_set(app: str, one: dict[str, Any], replicas: int = 1, **spec: Any) -> dict[str, Any]:
    return {
        "kind": "StatefulSet",
        "metadata": {"name": app},
        "spec": {
            "replicas": replicas,
            "serviceName": app,
            "template": template(app, one, **spec),
        },
    }


def service(app: str, name: str = "", **spec: Any) -> dict[str, Any]:
    return {
        "kind": "Service",
        "metadata": {"name": name or app},
        "spec": {
            "selector": {"app": app},
            "ports": [{"port": 80, "targetPort": "http"}],
            **spec,
        },
    }


def once(name: str, script: str) -> dict[str, Any]:
    return {
        **template(name, container(script), restartPolicy="Never"),
        "kind": "Pod",
        "metadata": {"name": name, "annotations": {"helm.sh/hook": "test"}},
    }


READY = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 0.1}
WEB = container(f"hostname > /tmp/index.html; {SERVE}", readinessProbe=READY)
LOOKS = """\
set -e
id -u; id -G
touch /tmp/mine
! touch /etc/mine 2> /dev/null
! ls /root/* 2> /dev/null
python - << END
import socket, urllib.request
def addresses(name):
    return sorted({one[4][0] for one in socket.getaddrinfo(name, 80, socket.AF_INET)})
assert len(addresses("web")) == 1, "an address of its own"
assert len(addresses("web-pods")) == 2, "those of its pods"
(first,) = addresses("web-1.web-pods.default.svc.cluster.local")
assert first in addresses("web-pods")
said = {urllib.request.urlopen("http://web").read().decode().strip() for _ in range(40)}
assert said == {"web-0", "web-1"}, said
END
echo all is as it should be
"""


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodCluster]:
    web_set = stateful_set("web", WEB, 2)
    web_set["spec"]["serviceName"] = "web-pods"
    objects = [
        web_set,
        service("web"),
        service("web", "web-pods", clusterIP="None"),
        once("looks", LOOKS),
    ]
    with PodCluster(Manifests.of(objects), tmp_path_factory.mktemp("web")) as cluster:
        cluster.wait_ready(60)
        yield cluster


@pytest.mark.slow
def test_pods_find_one_another_by_name_and_write_to_volumes_only(web: PodCluster) -> None:
    status, said = web.run_test(timeout_s=60)
    assert status == 0, said
    assert said.splitlines()[:2] == ["10001", "10001"]


@pytest.mark.slow
def test_a_service_is_reached_from_this_machine(web: PodCluster) -> None:
    with urllib.request.urlopen(web.url("web"), timeout=60) as answer:
        assert answer.read().decode().startswith("web-")


@pytest.mark.slow
def test_a_set_grows_and_shrinks_at_its_end(web: PodCluster) -> None:
    web.scale("web", 3)
    web.wait_ready(60)
    assert [pod.name for pod in web.pods_of("web")] == ["web-0", "web-1", "web-2"]
    web.scale("web", 2)
    web.wait_ready(60)
    assert [pod.name for pod in web.pods_of("web")] == ["web-0", "web-1"]


def run(folder: Path, *objects: dict[str, Any]) -> PodCluster:
    return PodCluster(Manifests.of(objects), folder)


@pytest.mark.slow
def test_a_container_that_ends_is_started_again_and_told_of_in_the_end(tmp_path: Path) -> None:
    one = container("echo no such flag; exit 2", readinessProbe=READY)
    ends = stateful_set("ends", one)
    with (
        pytest.raises(AssertionError, match="ends-0 cannot be run") as caught,
        run(tmp_path, ends) as cluster,
    ):
        cluster.wait_ready(60)
    assert "main exited 2" in str(caught.value)
    assert "no such flag" in str(caught.value)


@pytest.mark.slow
def test_a_container_that_is_not_well_is_started_again(tmp_path: Path) -> None:
    probe = {"exec": {"command": ["test", "-e", "/tmp/well"]}, "periodSeconds": 0.1}
    script = f"touch /tmp/well; {SERVE}"
    probes = {"startupProbe": {**READY, "failureThreshold": 600}, "readinessProbe": READY}
    one = container(script, livenessProbe={**probe, "failureThreshold": 2}, **probes)
    with run(tmp_path, stateful_set("sick", one)) as cluster:
        cluster.wait_ready(60)
        (pod,) = cluster.pods_of("sick")
        (pod.volumes["tmp"] / "well").unlink()
        wait_until(lambda: pod.states[0].num_restarts == 1, "it is started again")
        assert any("liveness probe" in event for event in pod.events)
        cluster.wait_ready(60)


@pytest.mark.slow
def test_a_pod_has_its_hook_and_its_grace_and_no_more(tmp_path: Path) -> None:
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo hook"]}}}
    polite = container(
        "trap 'echo told; exit 0' TERM; echo up; while :; do sleep 0.1; done", lifecycle=hook
    )
    deaf = container("trap '' TERM; echo up; while :; do sleep 0.1; done")
    sets = stateful_set("polite", polite), stateful_set("deaf", deaf)
    sets[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 60
    with run(tmp_path, *sets) as cluster:
        cluster.wait_ready(60)
        for app in ("polite", "deaf"):
            (pod,) = cluster.pods_of(app)
            wait_until(lambda pod=pod: "up" in pod.log(), "its trap is set")
        (pod,) = cluster.pods_of("polite")
        cluster.delete_pod("polite-0")
        assert pod.log().split() == ["up", "hook", "told"]
        assert pod.states[0].last_end == "exited 0"
        (pod,) = cluster.pods_of("deaf")
        cluster.delete_pod("deaf-0")
        assert pod.states[0].last_end == "exited 137"
        assert any("did not end within its grace" in event for event in pod.events)


@pytest.mark.slow
def test_what_is_not_there_keeps_a_pod_from_running(tmp_path: Path) -> None:
    missing = [{"name": "S", "valueFrom": {"secretKeyRef": {"name": "none", "key": "k"}}}]
    lacks = stateful_set("lacks", container(SERVE, env=missing))
    with (
        pytest.raises(AssertionError, match="key 'k' of Secret 'none' not found"),
        run(tmp_path, lacks) as cluster,
    ):
        cluster.wait_ready(60)


@pytest.mark.slow
def test_a_probe_of_a_port_without_a_name_is_an_error(tmp_path: Path) -> None:
    nowhere = {"httpGet": {"path": "/", "port": "helth"}}
    wrong = stateful_set("wrong", container(SERVE, readinessProbe=nowhere))
    with (
        pytest.raises(AssertionError, match="has no port named 'helth'"),
        run(tmp_path, wrong) as cluster,
    ):
        cluster.wait_ready(60)
