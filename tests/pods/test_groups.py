"""Groups of pods of small shell scripts: the harness does to them what the controller does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pods.cluster import PodCluster
from tests.pods.manifests import Manifests
from tests.pods.network import why_not
from tests.pods.test_pods import READY, SERVE, container, template
from tests.waiting import wait_until

REASON = why_not()
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(REASON), reason=REASON or "can be run")]

LABEL = "metadata.labels['leaderworkerset.sigs.k8s.io/{}']"
TELLS = """\
echo $LWS_LEADER_ADDRESS $LWS_GROUP_SIZE $LWS_WORKER_INDEX $GROUP $INDEX > /tmp/index.html
"""
MEETS = """\
set -e
for name in web-0 web-0-1 web-0-2; do
    getent hosts $name.web.default.svc.cluster.local
done
"""


def field_of(name: str, label: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": LABEL.format(label)}}}


def group_set(script: str, size: int, replicas: int = 1) -> dict[str, Any]:
    env = [field_of("GROUP", "group-index"), field_of("INDEX", "worker-index")]
    one = container(script, readinessProbe=READY, env=env)
    return {
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": replicas,
            "leaderWorkerTemplate": {
                "size": size,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": template("web", one),
            },
        },
    }


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodCluster]:
    objects = Manifests.of([group_set(TELLS + SERVE, 3)])
    with PodCluster(objects, tmp_path_factory.mktemp("web")) as cluster:
        cluster.wait_ready(60)
        yield cluster


def uids(cluster: PodCluster) -> dict[str, str]:
    return {pod.name: pod.place.facts.uid for pod in cluster.pods_of("web")}


@pytest.mark.slow
def test_pods_of_a_group_are_told_which_they_are(web: PodCluster) -> None:
    pods = web.pods_of("web")
    assert [pod.name for pod in pods] == ["web-0", "web-0-1", "web-0-2"]
    for index, pod in enumerate(pods):
        told = (pod.volumes["tmp"] / "index.html").read_text().split()
        assert told == ["web-0.web.default", "3", str(index), "0", str(index)]


@pytest.mark.slow
def test_a_group_is_made_anew_where_a_container_of_it_dies(web: PodCluster) -> None:
    before = uids(web)
    web.signal(web.pods_of("web")[1], signal.SIGKILL)
    wait_until(lambda: web.num_recreated("web") == 1, "it is seen")
    web.wait_ready(60)
    after = uids(web)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())


@pytest.mark.slow
def test_a_group_is_made_anew_where_a_pod_of_it_goes(web: PodCluster) -> None:
    before, count = uids(web), web.num_recreated("web")
    web.delete_pod("web-0-2")
    wait_until(lambda: web.num_recreated("web") == count + 1, "it is seen")
    web.wait_ready(60)
    assert not set(uids(web).values()) & set(before.values())


@pytest.mark.slow
def test_whole_groups_come_and_go(web: PodCluster) -> None:
    before, count = uids(web), web.num_recreated("web")
    web.scale("web", 2)
    web.wait_ready(60)
    assert len(web.pods_of("web")) == 6
    web.scale("web", 1)
    web.wait_ready(60)
    assert uids(web) == before
    assert web.num_recreated("web") == count


@pytest.mark.slow
def test_a_group_that_ends_again_and_again_is_told_of(tmp_path: Path) -> None:
    ends = group_set("echo no such flag; exit 2", 2)
    with (
        pytest.raises(AssertionError, match="web cannot be run") as caught,
        PodCluster(Manifests.of([ends]), tmp_path) as cluster,
    ):
        cluster.wait_ready(60)
    assert "no such flag" in str(caught.value)


@pytest.mark.slow
def test_pods_of_a_group_have_names_before_they_are_ready(tmp_path: Path) -> None:
    script = f"until ({MEETS}); do sleep 0.1; done; {TELLS}{SERVE}"
    with PodCluster(Manifests.of([group_set(script, 3)]), tmp_path) as cluster:
        cluster.wait_ready(60)
