"""Two models behind one router: a DeepSeek and a Llama, each with workers of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.ports import free_port
from engine.boot.build import build_model
from engine.generate import generate
from runtime.config import ClusterConfig, ModelSection, RouterSection
from runtime.config.file import dump_config
from runtime.sampling import SamplingParams
from tests.engine.tiny_llama import llama_config, write_llama
from tests.integration.client import run_all
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR
from tests.router.conftest import write_model
from tests.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
FIRST, SECOND, ALIAS = "tandem-python", "tiny-llama", "small"
NUM_TOKENS = 20
ROLES = ("prefill", "decode")


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_model(folder)
    text = json.loads((folder / "config.json").read_text())
    sizes = {"vocab_size": text["vocab_size"], "eos_token_id": text["eos_token_id"]}
    return write_llama(folder, llama_config(**sizes), seed=2)


def tokens_of(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What one process makes of the prompts."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    return [output.token_ids for output in generate(build_model(folder), prompts, greedy)]


def params_of(model: str, number: int) -> list[dict[str, Any]]:
    one = {"model": model, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    return [one] * number


def get(cluster: Cluster, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"{cluster.base_url}{path}", timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def start_worker(cluster: Cluster, model: ModelSection, role: str, folder: Path) -> None:
    """One rank that serves another model at the same router."""
    file = folder / f"{model.name}-{role}.toml"  # another of the two may be reading its own
    file.write_text(dump_config(dataclasses.replace(cluster.config, model=model)))
    name = f"llama-{role}"
    command = [role, "--config", str(file), "--instance", name, "--rank", "0"]
    command += ["--rendezvous", f"127.0.0.1:{free_port('127.0.0.1')}"]
    cluster._start(f"{name}/0", [*command, "--router", cluster.control_address])


@contextlib.contextmanager
def asking_all_the_time(ask: Callable[[], bool]) -> Iterator[None]:
    """On a thread; each time ``ask`` must be content."""
    contents: list[bool] = []
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            contents.append(ask())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert contents
    assert all(contents)


def test_each_answers_for_itself_and_the_end_of_one_is_not_the_other_s(
    llama_dir: Path, tmp_path: Path
) -> None:
    draw = random.Random(5)
    prompts = [[draw.randrange(10, 300) for _ in range(n)] for n in (3, 64, 130)]
    expected = {FIRST: tokens_of(MODEL_DIR, prompts), SECOND: tokens_of(llama_dir, prompts)}
    assert expected[FIRST] != expected[SECOND]
    models = tmp_path / "models.toml"
    models.write_text(f'[models.{SECOND}]\npath = "{llama_dir}"\naliases = ["{ALIAS}"]\n')
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR), name=FIRST),
        router=RouterSection(models_file=str(models), worker_wait_s=0.0, lease_ttl_s=2.0),
    )
    second = ModelSection(path=str(llama_dir), name=SECOND)
    with Cluster(config, tmp_path / "cluster") as cluster:

        def answers(model: str) -> list[list[int]]:
            got = run_all(cluster.base_url, prompts, params_of(model, len(prompts)))
            assert [completion.error for completion in got] == [None] * len(prompts)
            return [completion.token_ids for completion in got]

        def is_ready(model: str) -> bool:
            return get(cluster, f"/ready?model={model}")[0] == 200

        assert [card["id"] for card in get(cluster, "/v1/models")[1]["data"]] == [FIRST]
        for role in ROLES:
            start_worker(cluster, second, role, tmp_path)
        wait_until(lambda: is_ready(SECOND), "the second model is ready", 300)
        cards = get(cluster, "/v1/models")[1]["data"]
        assert [card["id"] for card in cards] == [FIRST, SECOND, ALIAS]
        assert answers(FIRST) == expected[FIRST]
        assert answers(SECOND) == answers(ALIAS) == expected[SECOND]

        # The second is scaled to nothing while the first is asked all the time.
        with asking_all_the_time(lambda: answers(FIRST) == expected[FIRST]):
            for role in ROLES:
                cluster.terminate(f"llama-{role}")
            wait_until(lambda: not is_ready(SECOND), "the second model is gone")
            (refused,) = run_all(cluster.base_url, prompts[:1], params_of(ALIAS, 1))
            assert refused.status == 503
            assert is_ready(FIRST)
            assert get(cluster, "/ready")[0] == 200
            status = cluster.status()
            assert status is not None
            ready = {row["name"]: row["ready"] for row in status["models"]}
            assert ready == {FIRST: True, SECOND: False}
        for role in ROLES:  # and comes back
            start_worker(cluster, second, role, tmp_path)
        wait_until(lambda: is_ready(SECOND), "the second model is back", 300)
        assert answers(SECOND) == expected[SECOND]
        cluster.wait_idle()
