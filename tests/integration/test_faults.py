"""Processes are killed for real; every request is answered, and every pool returns to zero."""

from __future__ import annotations

import asyncio
import functools
import random
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection, RouterSection
from tests.integration.client import Completion, complete, run_all, stream
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR
from tests.integration.test_soak import KNOWN_CODES

MIGRATIONS_METRIC = "pd_router_migrations_total"
ANSWERED_WITHIN_S = 60.0
"""After a death, on a busy machine; what is waited for is a socket that closes, and leases."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def config_with(**sections: Any) -> ClusterConfig:
    return ClusterConfig(model=ModelSection(path=str(MODEL_DIR)), **sections)


def random_prompts(count: int, length: int) -> list[list[int]]:
    draw = random.Random(count * length)
    return [[draw.randrange(300, 4000) for _ in range(length)] for _ in range(count)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = config_with(router=RouterSection(lease_ttl_s=2.0, worker_wait_s=300.0))
    with Cluster(config, tmp_path_factory.mktemp("faults")) as running:
        yield running
    assert running.marked_processes() == []


async def streams_while(
    cluster: Cluster, prompts: list[list[int]], max_tokens: int, action: Any
) -> list[Completion]:
    """Stream all prompts; call ``action`` when a third of them have their first token, or all
    are over.
    """
    begun: set[int] = set()
    async with aiohttp.ClientSession(
        cluster.base_url, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        tasks = [
            asyncio.create_task(
                stream(
                    session,
                    prompt,
                    on_event=functools.partial(begun.add, index),
                    model="tandem-python",
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    temperature=0,
                )
            )
            for index, prompt in enumerate(prompts)
        ]
        while 3 * len(begun) < len(prompts) and not all(task.done() for task in tasks):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(action)
        return await asyncio.wait_for(asyncio.gather(*tasks), 400)


def num_migrations(cluster: Cluster, reason: str = "") -> float:
    """Moves of requests to other workers; for this reason, if one is given."""
    with urllib.request.urlopen(f"{cluster.base_url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(MIGRATIONS_METRIC + "{") and reason in line
    )


def check_answered(answers: list[Completion], max_tokens: int) -> int:
    """Every request is whole, or failed with its id in the message; returns how many failed."""
    num_failed = 0
    for answer in answers:
        if answer.error is None:
            assert answer.finish_reason == "length"
            assert len(answer.token_ids) == max_tokens
        else:
            num_failed += 1
            assert answer.request_id
            assert answer.error["request_id"] == answer.request_id
            assert answer.error["code"] in KNOWN_CODES, answer.error  # no internal_error
    return num_failed


class Death:
    """Kills a process when it is called; knows how long ago that was."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name
        self._at = 0.0

    @property
    def age_s(self) -> float:
        """Seconds since then."""
        assert self._at
        return time.monotonic() - self._at

    def __call__(self) -> None:
        self._cluster.kill(self._name)
        self._at = time.monotonic()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_that_comes_back_costs_no_request(cluster: Cluster, role: str) -> None:
    prompts = random_prompts(12, 200)

    def restart() -> None:
        cluster.kill(f"{role}-0/0")
        cluster.start_instance(role, 0)

    answers = asyncio.run(streams_while(cluster, prompts, 100, restart))
    assert check_answered(answers, 100) == 0, [answer.error for answer in answers]
    cluster.wait_workers(2)
    cluster.wait_idle()
    again = run_all(
        cluster.base_url,
        prompts[:4],
        [{"model": "tandem-python", "max_tokens": 5, "ignore_eos": True}] * 4,
    )
    assert [answer.error for answer in again] == [None] * 4
    cluster.wait_idle()


def test_a_deadline_is_answered_and_frees_everything(tmp_path: Path) -> None:
    config = config_with(router=RouterSection(request_timeout_s=1.0))
    with Cluster(config, tmp_path) as running:
        prompts = random_prompts(24, 700)
        answers = asyncio.run(streams_while(running, prompts, 3000, lambda: None))
        assert check_answered(answers, 3000) == len(prompts)
        for answer in answers:
            assert answer.error is not None
            assert answer.error["code"] == "timeout"
        running.wait_idle()


@pytest.mark.parametrize(
    ("role", "count", "length"),
    # Decode dies while it generates, prefill while it has prompts for seconds.
    [("decode", 12, 100), pytest.param("prefill", 24, 700, marks=pytest.mark.nightly)],
)
def test_a_dead_rank_ends_its_group_and_its_requests(
    tmp_path: Path, role: str, count: int, length: int
) -> None:
    dp = {"prefill": 1, "decode": 1, role: 2}
    config = config_with(
        router=RouterSection(lease_ttl_s=2.0, worker_wait_s=0.0),  # nobody waits for it
        decode=DecodeSection(dp=dp["decode"], num_blocks=128),
        prefill=PrefillSection(dp=dp["prefill"], num_blocks=128),
    )
    with Cluster(config, tmp_path) as running:
        prompts = random_prompts(count, length)
        death = Death(running, f"{role}-0/1")
        answers = asyncio.run(streams_while(running, prompts, 400, death))
        assert role != "decode" or death.age_s < ANSWERED_WITHIN_S
        assert check_answered(answers, 400) > 0
        running.wait_exit(f"{role}-0/0")
        running.start_instance(role, 0)
        running.wait_workers(3)
        running.wait_idle()

        async def one() -> Completion:
            async with aiohttp.ClientSession(running.base_url) as session:
                return await complete(session, prompts[0], model="tandem-python", max_tokens=4)

        assert asyncio.run(one()).status == 200
        running.wait_idle()


@pytest.mark.nightly
@pytest.mark.parametrize("hangs", [False, True])
def test_another_decode_group_takes_what_a_dead_rank_leaves(tmp_path: Path, hangs: bool) -> None:
    config = config_with(
        router=RouterSection(lease_ttl_s=2.0),
        decode=DecodeSection(instances=2, dp=2, num_blocks=128, step_timeout_s=8.0),
    )
    with Cluster(config, tmp_path) as running:
        prompts = random_prompts(30, 300)

        def act() -> None:
            if hangs:  # the other rank waits for it in a collective, until its watchdog has enough
                running.processes["decode-0/1"].send_signal(signal.SIGSTOP)
            else:
                running.kill("decode-0/1")

        answers = asyncio.run(streams_while(running, prompts, 40, act))
        # Whoever lost it, and however much of it the client has: the other group goes on with it.
        assert check_answered(answers, 40) == 0, [answer.error for answer in answers]
        assert num_migrations(running) > 0
        running.wait_exit("decode-0/0")
        if hangs:
            running.kill("decode-0/1")
        running.start_instance("decode", 0)
        running.wait_workers(5)
        running.wait_idle()


@pytest.mark.nightly
def test_another_prefill_group_takes_what_one_that_ends_leaves(tmp_path: Path) -> None:
    config = config_with(
        router=RouterSection(lease_ttl_s=2.0),
        decode=DecodeSection(num_blocks=256),
        prefill=PrefillSection(
            # Small steps: on a busy CPU none may take as long as one that never ends.
            instances=2,
            dp=2,
            num_blocks=128,
            max_num_batched_tokens=256,
            step_timeout_s=6.0,
        ),
    )
    with Cluster(config, tmp_path) as running:

        def hang() -> None:
            """One rank stands still: the other waits for it until its watchdog has enough."""
            running.processes["prefill-0/1"].send_signal(signal.SIGSTOP)

        def stop() -> None:
            """Both ranks are told to stop, and not to wait for what they have."""
            for _ in range(2):
                for rank in range(2):
                    running.processes[f"prefill-1/{rank}"].send_signal(signal.SIGTERM)
                time.sleep(0.1)

        # Other prompts each time: none is cached.
        for action, count, reason in ((hang, 24, "peer_lost"), (stop, 36, "draining")):
            prompts = random_prompts(count, 700)
            answers = asyncio.run(streams_while(running, prompts, 8, action))
            assert check_answered(answers, 8) == 0, [answer.error for answer in answers]
            assert num_migrations(running, reason) > 0
            if action is hang:
                running.wait_exit("prefill-0/0")
                running.kill("prefill-0/1")
                running.start_instance("prefill", 0)
                running.wait_workers(5)
        for rank in range(2):
            assert running.processes.pop(f"prefill-1/{rank}").wait(60) == 0
        running.wait_workers(3)
        running.wait_idle()
