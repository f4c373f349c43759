"""The chart brings the checkpoint, to a claim by a Job or to a node by its pods, and serves it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helm.rendering import merged, profile
from tests.integration.client import complete
from tests.pods.chart import MODEL, ROUTER, cluster_of, release_of
from tests.pods.cluster import PodCluster
from tests.pods.container import BUNDLED_MODEL
from tests.pods.network import why_not

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON or "can be run"),
    pytest.mark.timeout(900),
    pytest.mark.nightly,
]

STORE = "/store/checkpoint"
"""What stands for an object store: a folder that only who fetches sees."""
FETCHED: dict[str, Any] = {
    "download": {
        "from": f"file://{STORE}",
        "extraVolumes": [{"name": "store", "hostPath": {"path": str(BUNDLED_MODEL)}}],
        "extraVolumeMounts": [{"name": "store", "mountPath": STORE, "readOnly": True}],
    }
}
QUICK = {"router": {"preStopSeconds": 1, "drainSeconds": 20}, "workers": {"drainSeconds": 5}}


def serves(cluster: PodCluster, model: str) -> None:
    """Ask for a completion, as a client and as `helm test` does."""

    async def ask() -> None:
        async with aiohttp.ClientSession(cluster.url(ROUTER)) as session:
            answer = await complete(session, "def f(n):", model=model, max_tokens=8, temperature=0)
            assert (answer.error, answer.status) == (None, 200)

    asyncio.run(ask())
    status, said = cluster.run_test()
    assert status == 0, said


def test_a_job_fills_the_claim_and_all_pods_wait_for_it(tmp_path: Path) -> None:
    values = merged(profile("cpu-demo"), QUICK, {"model": {"source": "claim", **FETCHED}})
    with cluster_of(release_of(values), tmp_path) as cluster:
        cluster.wait_ready()
        (job,) = [pod for name, pod in cluster.node.pods.items() if "-download-" in name]
        assert job.exit_status == 0, job.log()
        serves(cluster, "checkpoint")
        assert cluster.events() == []


def test_pods_of_a_node_share_one_copy_that_one_of_them_fetched(tmp_path: Path) -> None:
    nodes = tmp_path / "models"
    nodes.mkdir()
    nodes.chmod(0o777)
    model = {"source": "hostPath", "hostPath": str(nodes), **FETCHED}
    values = merged(profile("cpu-demo"), QUICK, {"model": model})
    with cluster_of(release_of(values), tmp_path / "pods") as cluster:
        cluster.wait_ready()
        serves(cluster, "checkpoint")
        logs = [file.read_text() for file in (tmp_path / "pods").rglob("model/log")]
        assert len(logs) == 3
        assert sum("1 of " in text for text in logs) == 1, logs
        assert cluster.events() == []


def test_openshift_s_user_of_no_name_serves(tmp_path: Path) -> None:
    """As its scheme restricted-v2 has it: a user of the namespace's range, of the group root."""
    assigned = {"runAsUser": 1000680000, "runAsGroup": 0, "fsGroup": 1000680000}
    values = merged(profile("cpu-demo"), profile("openshift"), QUICK)
    objects = release_of(merged(values, {"podSecurityContext": assigned}))
    with cluster_of([one for one in objects if one["kind"] != "Route"], tmp_path) as cluster:
        cluster.wait_ready()
        serves(cluster, MODEL)
