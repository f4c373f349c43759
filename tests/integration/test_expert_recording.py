"""What is recorded of real workers is what their gates chose: every token once a layer, no padding.

Ranks that share experts have unequal requests, so that some pad and some run dummies.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from deploy.clients.expert_recording import instances_to_record, record
from deploy.errors import ClusterError, WrongArgumentError
from deploy.plan import Role
from deploy.views.pool_watch import PoolMembers, fetch_members
from engine.boot.build import build_model
from engine.boot.experts import count_experts
from engine.generate import generate
from experts.trace import ExpertTrace
from router.pool.expert_recording import Recorded, Wanted
from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from runtime.sampling import SamplingParams
from tests.engine.tiny import TINY, tiny_config, write_checkpoint
from tests.integration.client import run_all
from tests.integration.cluster import NO_DRAFTS, Cluster
from tests.router.conftest import write_model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
NUM_TOKENS = 12
LENGTHS = (1, 5, 63, 64, 65, 150)
LAYERS, EXPERTS, TOP_K = 2, 8, 2
PREFILLS = {
    "dp2": PrefillSection(dp=2, max_num_batched_tokens=96, num_blocks=64),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder)
    text = json.loads((folder / "config.json").read_text())
    sizes = {"vocab_size": text["vocab_size"], "eos_token_id": text["eos_token_id"]}
    return write_checkpoint(folder, tiny_config(**sizes), seed=2)


@pytest.mark.parametrize("name", PREFILLS)
async def test_a_recording_counts_each_token_once(
    name: str, model_dir: Path, tmp_path: Path
) -> None:
    config = ClusterConfig(
        model=ModelSection(path=str(model_dir), name="tiny"),
        prefill=PREFILLS[name],
        decode=DecodeSection(dp=2, num_blocks=64, num_speculative_tokens=NO_DRAFTS),
    )
    with Cluster(config, tmp_path) as cluster:
        await _check(cluster, model_dir)


async def _check(cluster: Cluster, model_dir: Path) -> None:
    members = await members_of(cluster)
    await _check_told(cluster)
    model = build_model(model_dir)
    counter = count_experts(model)
    assert counter is not None
    draw = random.Random(3)
    prompts = [[draw.randrange(10, model.config.vocab_size) for _ in range(n)] for n in LENGTHS]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    generate(model, prompts, greedy)
    expected = {
        Role.PREFILL: sum(LENGTHS),
        Role.DECODE: len(LENGTHS) * (NUM_TOKENS - 1),  # prefill gives the first one
    }
    traces = await record_load(cluster, members, prompts, expected)
    for role, trace in traces.items():
        assert (trace.role, trace.model_name) == (role.value, "tiny")
        assert trace.counts_NLE.shape[1:] == (LAYERS, EXPERTS)
        assert trace.num_ranks == 2
        assert trace.tokens_N.sum() == expected[role]
        sums_NL = trace.counts_NLE.sum(axis=2)
        assert (sums_NL == trace.tokens_N[:, None] * TOP_K).all(), role
    # One process with all of it chooses the same, but where two experts are as good.
    recorded = sum(trace.counts_NLE.sum(axis=0) for trace in traces.values())
    assert np.abs(recorded - counter.start_reading().read()).sum() <= 4


async def _check_told(cluster: Cluster) -> None:
    """The console offers the instances whose experts can be recorded."""
    async with (
        aiohttp.ClientSession(cluster.base_url) as http,
        http.get("/console/data") as response,
    ):
        told = (await response.json())["with_experts"]
    assert told == [
        {"instance": "decode-0", "role": "decode"},
        {"instance": "prefill-0", "role": "prefill"},
    ]


async def members_of(cluster: Cluster) -> PoolMembers:
    return await fetch_members(
        cluster.control_address, cluster.base_url, cluster.credentials, timeout_s=60
    )


async def record_load(
    cluster: Cluster,
    members: PoolMembers,
    prompts: list[list[int]],
    expected: dict[Role, int],
) -> dict[Role, ExpertTrace]:
    """What both roles run for the prompts, pass by pass."""
    until = asyncio.Event()
    latest: dict[Role, Recorded] = {}
    tasks = {
        role: asyncio.ensure_future(
            record(
                instances_to_record(members, role),
                cluster.credentials,
                Wanted(seconds=600),
                until=until,
                on_progress=lambda recorded, role=role: latest.__setitem__(role, recorded),
            )
        )
        for role in expected
    }
    await asyncio.sleep(1.0)  # the calls are there
    params = {
        "model": "tiny", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    got = await asyncio.to_thread(run_all, cluster.base_url, prompts, [params] * len(prompts))
    assert [completion.error for completion in got] == [None] * len(prompts)
    deadline = asyncio.get_running_loop().time() + 60
    while any(
        role not in latest or latest[role].num_tokens < count for role, count in expected.items()
    ):
        assert not any(task.done() for task in tasks.values()), tasks
        assert asyncio.get_running_loop().time() < deadline, latest
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)  # nothing more comes
    until.set()
    return {role: await task for role, task in tasks.items()}


def test_a_cluster_that_starts_from_recordings_says_the_same(
    model_dir: Path, tmp_path: Path
) -> None:
    draw, generator = random.Random(5), np.random.default_rng(5)
    model = build_model(model_dir)
    prompts = [[draw.randrange(10, model.config.vocab_size) for _ in range(n)] for n in LENGTHS]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    expected = [output.token_ids for output in generate(model, prompts, greedy)]
    paths = {}
    for role in ("prefill", "decode"):
        counts = generator.integers(1, 1000, (1, LAYERS, EXPERTS))
        trace = ExpertTrace(
            counts_NLE=counts,
            tokens_N=counts.sum(axis=2).max(axis=1),
            role=role,
            model_name="tiny",
            top_k=TOP_K,
            num_ranks=2,
            hidden_size=TINY["hidden_size"],
            moe_intermediate_size=TINY["moe_intermediate_size"],
            expert_bytes=1,
        )
        paths[role] = str(tmp_path / f"{role}.npz")
        trace.save(Path(paths[role]))
    config = ClusterConfig(
        model=ModelSection(path=str(model_dir), name="tiny"),
        prefill=PrefillSection(
            tp=2, num_blocks=64, num_redundant_experts=2, expert_load=paths["prefill"]
        ),
        decode=DecodeSection(
            dp=2, num_blocks=64, num_redundant_experts=4, expert_load=paths["decode"]
        ),
    )
    params = {
        "model": "tiny", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    with Cluster(config, tmp_path / "cluster") as cluster:
        got = run_all(cluster.base_url, prompts, [params] * len(prompts))
    assert [completion.error for completion in got] == [None] * len(prompts)
    assert [completion.token_ids for completion in got] == expected


async def test_who_cannot_be_recorded_is_named(model_dir: Path, tmp_path: Path) -> None:
    config = ClusterConfig(model=ModelSection(path=str(model_dir), name="tiny"))
    with Cluster(config, tmp_path) as cluster:
        members = await members_of(cluster)
        with pytest.raises(WrongArgumentError, match=r"'decode-7'.*decode-0"):
            instances_to_record(members, Role.DECODE, "decode-7")
        ranks = instances_to_record(members, Role.DECODE)
        with pytest.raises(ClusterError, match="no step was made in 1 s"):
            await record(ranks, cluster.credentials, Wanted(seconds=1))
