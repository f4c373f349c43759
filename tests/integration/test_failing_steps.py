"""A step that fails ends its requests and nothing else, in groups of real processes too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest

from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection, RouterSection
from tests.integration.client import Completion, complete
from tests.integration.cluster import NO_DRAFTS, Cluster
from tests.integration.conftest import MODEL_DIR
from tests.integration.failing_steps import AT_FAULT, UNFOLLOWED, UNPREPARED, UNSAMPLED
from tests.integration.test_faults import random_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MODULE = "tests.integration.failing_steps"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(NO_DRAFTS, id="no drafts", marks=pytest.mark.nightly),
        pytest.param("default", id="a draft"),
    ],
)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        # There is one instance of prefill: nobody waits until it may be asked again.
        router=RouterSection(worker_wait_s=0.0),
        prefill=PrefillSection(tp=2, num_blocks=128, max_num_batched_tokens=128),
        decode=DecodeSection(dp=2, num_blocks=128, num_speculative_tokens=request.param),
    )
    folder = tmp_path_factory.mktemp("failing-steps")
    with Cluster(config, folder, modules={"prefill": MODULE, "decode": MODULE}) as running:
        yield running
    assert running.marked_processes() == []


async def answer_all(cluster: Cluster, prompts: list[list[int]], count: int) -> list[Completion]:
    async with aiohttp.ClientSession(cluster.base_url) as session:
        return await asyncio.gather(
            *(
                complete(session, prompt, model="tandem-python", max_tokens=count, temperature=0)
                for prompt in prompts
            )
        )


@pytest.mark.parametrize(
    ("token_id", "reason"),
    [
        (AT_FAULT["prefill"], "is at fault"),
        (UNPREPARED["prefill"], "MemoryError: no pinned memory"),
        (UNSAMPLED["prefill"], "RuntimeError: a table is too small"),
        (UNFOLLOWED["prefill"], "rank 1 cannot prepare it; its log says why"),
        (AT_FAULT["decode"], "is at fault"),
        (UNPREPARED["decode"], "MemoryError: no pinned memory"),
        (UNSAMPLED["decode"], "RuntimeError: a table is too small"),
    ],
)
def test_a_step_that_fails_ends_its_requests_and_no_rank(
    cluster: Cluster, token_id: int, reason: str
) -> None:
    pids = {name: process.pid for name, process in cluster.processes.items()}
    (broken,) = asyncio.run(answer_all(cluster, [[token_id, *range(300, 340)]], 8))
    assert broken.status == 500, broken
    assert broken.error is not None
    assert "its step failed: " in broken.error["message"]
    assert reason in broken.error["message"]
    # The same ranks go on, in step: long prompts in chunks, and both decode ranks.
    prompts = random_prompts(3, 50 + token_id)
    answers = asyncio.run(answer_all(cluster, prompts, 6))
    assert [answer.error for answer in answers] == [None] * 3
    assert all(len(answer.token_ids) == 6 for answer in answers)
    cluster.wait_idle()
    assert {name: process.pid for name, process in cluster.processes.items()} == pids
    assert all(process.poll() is None for process in cluster.processes.values())


def test_beside_a_request_at_fault_the_others_have_their_tokens(cluster: Cluster) -> None:
    prompts = random_prompts(5, 61)
    alone = asyncio.run(answer_all(cluster, prompts, 12))
    for role in ("prefill", "decode"):
        faulty = [AT_FAULT[role], *range(400, 460)]
        broken, *together = asyncio.run(answer_all(cluster, [faulty, *prompts], 12))
        assert broken.status == 500
        assert [one.token_ids for one in together] == [one.token_ids for one in alone]
        cluster.wait_idle()
