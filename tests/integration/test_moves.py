"""A worker's step or its process fails in every way: the other worker of its role goes on with all
that it had, and every pool returns to zero.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection, RouterSection
from tests.integration.client import run_all
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR
from tests.integration.failing_steps import DEVICE, FOLDER, HANG, MEMORY, befall
from tests.integration.test_faults import (
    check_answered,
    num_migrations,
    random_prompts,
    streams_while,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
MODULE = "tests.integration.failing_steps"
STEP_TIMEOUT_S = 8.0
"""Longer than any step here on a busy machine, and shorter than a connection's silence."""


@dataclass
class House:
    """Two workers of each role, and what befalls them."""

    cluster: Cluster
    faults: Path
    num_faults: int = 0

    def strike(self, role: str, fault: str) -> None:
        """Have it befall the first worker of a role, which has requests."""
        worker = f"{role}-0/0"
        match fault:
            case "stop":
                self.cluster.processes[worker].send_signal(signal.SIGSTOP)
            case "kill":
                self.cluster.kill(worker)
            case _:
                befall(self.faults, f"{role}-0", fault)

    def restore(self, role: str, fault: str) -> None:
        """Have four workers again, the first of them another life where its end was due."""
        worker = f"{role}-0/0"
        if fault in (HANG, DEVICE, MEMORY):
            struck = self.faults / f"{role}-0"
            wait_until(lambda: not struck.exists(), f"{fault} has befallen {worker}")
        if fault in (HANG, DEVICE):
            self.cluster.wait_exit(worker)
        if fault == "stop":
            self.cluster.kill(worker)
        if fault != MEMORY:
            self.cluster.start_instance(role, 0)
        self.cluster.wait_workers(4)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    faults = tmp_path_factory.mktemp("faults")
    section = {"instances": 2, "num_blocks": 192, "step_timeout_s": STEP_TIMEOUT_S}
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        router=RouterSection(lease_ttl_s=2.0, worker_wait_s=300.0),
        prefill=PrefillSection(**section, max_num_batched_tokens=256),  # type: ignore[arg-type]
        decode=DecodeSection(**section),  # type: ignore[arg-type]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(faults))
        modules = {"prefill": MODULE, "decode": MODULE}
        folder = tmp_path_factory.mktemp("moves")
        with Cluster(config, folder, modules=modules) as cluster:
            yield House(cluster, faults)
    assert cluster.marked_processes() == []


@pytest.mark.parametrize("fault", [HANG, DEVICE, MEMORY, "stop", "kill"])
@pytest.mark.parametrize(("role", "length"), [("decode", 100), ("prefill", 700)])
def test_the_other_worker_goes_on_with_everything(
    house: House, role: str, length: int, fault: str
) -> None:
    cluster = house.cluster
    house.num_faults += 1
    # Other prompts each time: none is cached.
    prompts = random_prompts(16, length + house.num_faults)
    before = num_migrations(cluster)
    num_tokens = 64 if role == "decode" else 8
    answers = asyncio.run(
        streams_while(cluster, prompts, num_tokens, lambda: house.strike(role, fault))
    )
    assert check_answered(answers, num_tokens) == 0, [answer.error for answer in answers]
    house.restore(role, fault)
    assert num_migrations(cluster) > before
    cluster.wait_idle()
    # And every token is that of an undisturbed request.
    params = {"model": "tandem-python", "max_tokens": num_tokens, "ignore_eos": True}
    calm = run_all(cluster.base_url, prompts, [{**params, "temperature": 0}] * len(prompts))
    assert [one.token_ids for one in answers] == [one.token_ids for one in calm]


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_that_stands_still_for_a_moment_costs_nothing(house: House, role: str) -> None:
    process = house.cluster.processes[f"{role}-0/0"]

    def pause() -> None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(5.0)
        process.send_signal(signal.SIGCONT)

    house.num_faults += 1
    prompts = random_prompts(16, 300 + house.num_faults)
    answers = asyncio.run(streams_while(house.cluster, prompts, 60, pause))
    assert check_answered(answers, 60) == 0, [answer.error for answer in answers]
    house.cluster.wait_workers(4)
    house.cluster.wait_idle()
