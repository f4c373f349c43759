"""Two releases of the chart, run: the second has workers alone, which join the first one's routers.

The first is the profile cpu-demo with the bundled model; the second serves a small Llama.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engine.tiny_llama import llama_config, write_llama
from tests.helm.rendering import merged, profile
from tests.integration.client import complete
from tests.pods.chart import MODEL, NAME, ROUTER, Load, cluster_of, in_thread, release_of
from tests.pods.cluster import PodCluster
from tests.pods.network import why_not
from tests.router.conftest import write_model

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON or "can be run"),
    pytest.mark.timeout(900),
    pytest.mark.nightly,
]

JOINING, SECOND, ALIAS = "llama", "tiny-llama", "small"
LLAMA_DECODE = f"{JOINING}-tandem-decode"
MOUNTED = f"/models/{SECOND}"
VALUES = {
    "router": {"preStopSeconds": 1, "drainSeconds": 20},
    "prefill": {"drainSeconds": 5},
    "decode": {"drainSeconds": 5},
}


def write_second(folder: Path) -> None:
    """The second model's checkpoint, which every user may read."""
    write_model(folder)
    text = json.loads((folder / "config.json").read_text())
    sizes = {"vocab_size": text["vocab_size"], "eos_token_id": text["eos_token_id"]}
    write_llama(folder, llama_config(**sizes), seed=2)
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def releases(models: Path) -> list[dict[str, Any]]:
    """Both releases' manifests; ``models`` is a folder of the node with the second's checkpoint."""
    router = {
        "models": {SECOND: {"path": MOUNTED, "aliases": [ALIAS]}},
        "extraVolumes": [{"name": "second", "hostPath": {"path": str(models / SECOND)}}],
        "extraVolumeMounts": [{"name": "second", "mountPath": MOUNTED, "readOnly": True}],
    }
    first = merged(profile("cpu-demo"), VALUES, {"router": router})
    second = merged(
        profile("cpu-demo"),
        VALUES,
        {
            "model": {"source": "hostPath", "hostPath": str(models), "path": MOUNTED},
            "join": {"release": NAME},
        },
    )
    second["keys"] = {}  # the profile's are those of HTTP
    return [*release_of(first), *release_of(second, JOINING)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodCluster]:
    models = tmp_path_factory.mktemp("models")
    models.chmod(0o755)
    (models / SECOND).mkdir()
    write_second(models / SECOND)
    with cluster_of(releases(models), tmp_path_factory.mktemp("both")) as cluster:
        cluster.wait_ready()
        yield cluster


def get(cluster: PodCluster, path: str) -> tuple[int, Any]:
    """What the routers answer."""

    async def ask() -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession(cluster.url(ROUTER)) as session,
            session.get(path) as answer,
        ):
            return answer.status, await answer.json()

    return asyncio.run(ask())


def test_both_models_answer_through_the_routers_of_one(both: PodCluster) -> None:
    listed = [card["id"] for card in get(both, "/v1/models")[1]["data"]]
    assert listed == [MODEL, SECOND, ALIAS]
    workers = get(both, "/status")[1]["workers"]
    assert {one["instance"]: one["model"] for one in workers} == {
        f"{release}-tandem-{role}-0": model
        for release, model in ((NAME, MODEL), (JOINING, SECOND))
        for role in ("prefill", "decode")
    }

    async def ask(model: str) -> tuple[str | None, list[int]]:
        async with aiohttp.ClientSession(both.url(ROUTER)) as session:
            options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = await complete(session, "def f(n):", model=model, **options)
            assert (answer.error, answer.status) == (None, 200)
            return answer.text, answer.token_ids

    first, second, alias = (asyncio.run(ask(model)) for model in (MODEL, SECOND, ALIAS))
    assert second == alias
    assert first != second


def test_each_release_s_own_test_proves_its_own_model(both: PodCluster) -> None:
    for release, model in ((NAME, MODEL), (JOINING, SECOND)):
        status, said = both.run_test(release)
        assert status == 0, said
        assert f"{model}: 16 tokens through prefill and decode" in said


def test_a_killed_worker_of_one_model_leaves_the_other_untouched(both: PodCluster) -> None:
    """The other's streams go on whole; its own comes back by itself, and answers again."""
    (pod,) = both.pods_of(LLAMA_DECODE)
    others = [one for one in both.node.pods.values() if one is not pod]
    restarts = {one.name: sum(state.num_restarts for state in one.states) for one in others}

    async def kill() -> Load:
        load = Load(both.url(ROUTER))
        async with load.under_way():
            await load.some_more()
            before = pod.states[0].num_restarts
            both.signal(pod, signal.SIGKILL)
            while pod.states[0].num_restarts == before:
                await asyncio.sleep(0.05)
            # While the worker is away, or just on its way back.
            await load.some_more()
            await in_thread(both.wait_ready)
            await in_thread(wait_served, both, SECOND)
            await load.some_more()
        return load

    assert asyncio.run(kill()).failed == []
    assert get(both, f"/ready?model={MODEL}")[0] == 200
    again = {one.name: sum(state.num_restarts for state in one.states) for one in others}
    assert again == restarts

    async def second_again() -> Load:
        load = Load(both.url(ROUTER), model=SECOND)
        async with load.under_way():
            await load.some_more()
        return load

    assert asyncio.run(second_again()).failed == []


def wait_served(cluster: PodCluster, model: str) -> None:
    """Until the routers have workers of both roles of it."""
    deadline = time.monotonic() + 120
    while get(cluster, f"/ready?model={model}")[0] != 200:
        assert time.monotonic() < deadline, cluster.describe()
        time.sleep(0.1)
