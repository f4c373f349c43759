"""Thousands of requests through transfers that fail, with cancels, and two peers killed.

Every request is answered: its whole greedy text, or a typed error that carries its id. At the end
nothing is held anywhere. The long one is `make soak`, a short one belongs to `make test`; both
print their figures.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from engine.generate import generate
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
    RouterSection,
)
from runtime.sampling import SamplingParams
from tests.integration.client import Completion, stream
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR
from tests.kv_transfer.libraries import skip_unless_loaded
from tests.waiting import wait_until

NUM_DISTINCT = 40
NUM_TOKENS = 6
CONCURRENCY = 32
CANCEL_SHARE = 0.1
MOST_MORE_FILES = 40
FAULTS = (
    "delay=0.04@0.02,stall=0.03@0.02,reorder=0.03@0.02,duplicate=0.03,mute=0.02,fail=0.003,"
    "partial=0.003,late=0.003@0.3,drop=0.001,disconnect=0.002,seed=11"
)
KNOWN_CODES = {
    *("worker_lost", "kv_transfer_failed", "worker_restarted", "timeout"),
    *("server_is_overloaded", "server_is_draining", "request_cancelled"),
}


def soak_config(transport: str = "loopback") -> ClusterConfig:
    return ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        router=RouterSection(lease_ttl_s=2.0, request_timeout_s=40.0),
        prefill=PrefillSection(instances=2, num_blocks=96),
        decode=DecodeSection(instances=2, num_blocks=96),
        kv_transfer=KVTransferSection(
            transport=transport,
            layers_per_group=2,
            transfer_timeout_s=6.0,
            quarantine_timeout_s=1.5,
            num_metadata_slots=64,
            faults=FAULTS,
        ),
    )


@dataclass(slots=True)
class Soak:
    """Requests against a cluster, and what became of them."""

    cluster: Cluster
    prompts: list[list[int]]
    expected: list[list[int]]
    num_requests: int
    restarts: dict[int, str]
    """Which instance is killed and started again when so many requests have been started."""
    outcomes: collections.Counter[str] = field(init=False, default_factory=collections.Counter)
    wrong: list[str] = field(init=False, default_factory=list)

    async def run(self) -> None:
        draw = random.Random(17)
        gate = asyncio.Semaphore(CONCURRENCY)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=60)
        actions: list[asyncio.Task[None]] = []
        async with (
            aiohttp.ClientSession(
                self.cluster.base_url, connector=connector, timeout=timeout
            ) as session,
            asyncio.TaskGroup() as group,
        ):
            for index in range(self.num_requests):
                await gate.acquire()
                if index in self.restarts:
                    name = self.restarts[index]
                    actions.append(group.create_task(asyncio.to_thread(self._restart, name)))
                cancel = draw.randrange(1, NUM_TOKENS) if draw.random() < CANCEL_SHARE else None
                which = draw.randrange(len(self.prompts))
                task = group.create_task(self._one(session, which, cancel))
                task.add_done_callback(lambda _: gate.release())

    def _restart(self, instance: str) -> None:
        self.cluster.kill(f"{instance}/0")
        for name in [name for name in self.cluster.processes if name.startswith(f"{instance}/")]:
            self.cluster.wait_exit(name)
        role, _, index = instance.partition("-")
        self.cluster.start_instance(role, int(index))

    async def _one(
        self, session: aiohttp.ClientSession, which: int, cancel_after: int | None
    ) -> None:
        answer = await stream(
            session,
            self.prompts[which],
            cancel_after=cancel_after,
            model="tandem-python",
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            temperature=0,
        )
        self._judge(answer, self.expected[which])

    def _judge(self, answer: Completion, expected: list[int]) -> None:
        """Tokens that came are right in any case; an error is typed and has the request's id."""
        if answer.token_ids != expected[: len(answer.token_ids)]:
            self.wrong.append(f"{answer.request_id}: {answer.token_ids} instead of {expected}")
        if answer.error is not None:
            code = str(answer.error["code"])
            self.outcomes[code] += 1
            if code not in KNOWN_CODES or answer.error["request_id"] != answer.request_id:
                self.wrong.append(f"{answer.request_id}: {answer.error}")
        elif answer.finish_reason == "cancelled":
            self.outcomes["cancelled by us"] += 1
        else:
            self.outcomes["success"] += 1
            if answer.token_ids != expected:
                self.wrong.append(f"{answer.request_id} is incomplete: {answer.token_ids}")


def make_soak(
    cluster: Cluster,
    oracle: DeepseekV3ForCausalLM,
    num_requests: int,
    restarts: dict[int, str],
) -> Soak:
    draw = random.Random(23)
    lengths = [draw.randrange(1, 260) for _ in range(NUM_DISTINCT)]
    prompts = [[draw.randrange(300, 4000) for _ in range(n)] for n in lengths]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    outputs = generate(oracle, prompts, [greedy] * len(prompts))
    expected = [output.token_ids for output in outputs]
    return Soak(cluster, prompts, expected, num_requests, restarts)


def registered_bytes(cluster: Cluster) -> dict[str, float]:
    """Memory that each worker has registered with its transport."""
    name = "pd_kv_transfer_registered_bytes"
    return {i: cluster.metric(i, name) for i in ("prefill-0", "prefill-1", "decode-0", "decode-1")}


def num_open_files(cluster: Cluster) -> dict[str, int]:
    """Open files and sockets of each process."""
    return {
        name: len(os.listdir(f"/proc/{process.pid}/fd"))
        for name, process in cluster.processes.items()
    }


def check_end(
    soak: Soak,
    elapsed_s: float,
    registered: dict[str, float],
    report: Callable[[str], object],
) -> None:
    """Everything is answered and right, nothing is held, and the same memory is registered."""
    cluster = soak.cluster
    sections = (cluster.config.prefill, cluster.config.decode)
    cluster.wait_workers(sum(section.instances * section.num_endpoints for section in sections))
    cluster.wait_idle(60.0)
    # Copies of late posts are gone a moment after they have landed.
    wait_until(lambda: registered_bytes(cluster) == registered, "registered memory is back")
    held = {
        f"{instance} {name}": cluster.metric(instance, name)
        for name in ("pd_decode_quarantined_blocks", "pd_kv_transfer_metadata_slots_in_use")
        for instance in ("decode-0", "decode-1")
    }
    figures = {
        "requests": soak.num_requests,
        "seconds": round(elapsed_s, 1),
        "outcomes": dict(soak.outcomes),
        "wrong": len(soak.wrong),
        "held": held,
    }
    report(f"\nsoak: {json.dumps(figures)}\n")
    assert soak.wrong == []
    assert sum(soak.outcomes.values()) == soak.num_requests
    assert soak.outcomes["success"] > 0.7 * soak.num_requests
    assert soak.outcomes["cancelled by us"] > 0
    assert set(held.values()) == {0.0}


def run_soak(
    config: ClusterConfig,
    folder: Path,
    oracle: DeepseekV3ForCausalLM,
    restarts: dict[int, str],
    *,
    num_requests: int,
    report: Callable[[str], object] = print,
) -> None:
    with Cluster(config, folder) as cluster:
        soak = make_soak(cluster, oracle, num_requests, restarts)
        first = dataclasses.replace(soak, num_requests=24, restarts={})
        asyncio.run(first.run())  # all have met
        assert first.wrong == []
        registered, files = registered_bytes(cluster), num_open_files(cluster)
        start = time.monotonic()
        asyncio.run(soak.run())
        check_end(soak, time.monotonic() - start, registered, report)
        grown = {
            name: count - files[name]
            for name, count in num_open_files(cluster).items()
            if name.partition("/")[0] not in restarts.values()
        }
        report(f"open files, more than before: {grown}\n")
        # A connection per peer and request would be hundreds.
        assert max(grown.values()) <= MOST_MORE_FILES
    assert cluster.marked_processes() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_soak(
    tmp_path: Path, oracle: DeepseekV3ForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        run_soak(soak_config(), tmp_path, oracle, {50: "prefill-0"}, num_requests=150)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_soak_of_data_parallel_prefill(
    tmp_path: Path,
    oracle: DeepseekV3ForCausalLM,
    capsys: pytest.CaptureFixture[str],
    overlap: str,
) -> None:
    config = soak_config()
    prefill = dataclasses.replace(
        config.prefill, dp=2, overlap_steps=overlap, two_batch_overlap=overlap
    )
    restarts = {60: "prefill-0", 200: "prefill-1"}
    with capsys.disabled():
        run_soak(
            dataclasses.replace(config, prefill=prefill),
            tmp_path,
            oracle,
            restarts,
            num_requests=350,
        )


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", ["loopback", "nixl"])
def test_a_soak_of_2000_requests(
    tmp_path: Path,
    oracle: DeepseekV3ForCausalLM,
    capsys: pytest.CaptureFixture[str],
    transport: str,
) -> None:
    if transport != "loopback":
        skip_unless_loaded(transport)
    restarts = {600: "prefill-0", 1300: "decode-1"}
    with capsys.disabled():
        run_soak(soak_config(transport), tmp_path, oracle, restarts, num_requests=2000)
