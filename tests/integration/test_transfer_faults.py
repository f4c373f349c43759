"""Real processes whose transfers fail on purpose: late writes, and a bad prefill worker."""

from __future__ import annotations

import asyncio
import random
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
from tests.integration.client import Completion, complete, stream
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_TOKENS = 6


def draw_prompts(count: int, length: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(300, 4000) for _ in range(length)] for _ in range(count)]


def expected_tokens(oracle: DeepseekV3ForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    return [output.token_ids for output in generate(oracle, prompts, [greedy] * len(prompts))]


async def run_streams(
    cluster: Cluster, prompts: list[list[int]], *, at_once: int, cancel_every: int = 0
) -> list[Completion]:
    gate = asyncio.Semaphore(at_once)

    async def one(session: aiohttp.ClientSession, index: int) -> Completion:
        cancel_after = 1 if cancel_every and index % cancel_every == 0 else None
        async with gate:
            return await stream(
                session,
                prompts[index],
                cancel_after=cancel_after,
                model="tandem-python",
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                temperature=0,
            )

    async with aiohttp.ClientSession(cluster.base_url) as session:
        return await asyncio.gather(*(one(session, index) for index in range(len(prompts))))


@pytest.mark.slow
def test_late_writes_never_reach_the_next_owner(
    oracle: DeepseekV3ForCausalLM, tmp_path: Path
) -> None:
    """Every tenth post lands half a second after it was given up, clients leave, and the pool of
    decode is so small that blocks are another request's at once.
    """
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        decode=DecodeSection(num_blocks=17, enable_prefix_caching=False),
        kv_transfer=KVTransferSection(
            transport="loopback", quarantine_timeout_s=1.0, faults="late=0.1@0.5,seed=3"
        ),
    )
    prompts = draw_prompts(48, 150)
    expected = expected_tokens(oracle, prompts)
    with Cluster(config, tmp_path) as running:
        answers = asyncio.run(run_streams(running, prompts, at_once=8, cancel_every=6))
        for answer, tokens in zip(answers, expected, strict=True):
            assert answer.token_ids == tokens[: len(answer.token_ids)]
            if answer.error is not None:
                assert answer.error["request_id"] == answer.request_id
            elif answer.finish_reason != "cancelled":
                assert answer.token_ids == tokens
        running.wait_idle()
        assert running.metric("prefill-0", "pd_kv_transfer_failures_total") > 0
        assert running.metric("decode-0", "pd_decode_fences_total") > 0
        assert running.metric("decode-0", "pd_kv_transfer_metadata_slots_in_use") == 0


@pytest.mark.nightly
def test_a_bad_prefill_worker_costs_no_request(
    oracle: DeepseekV3ForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever prefill-0 sends fails: the other one serves, also behind a first token that is out.

    Then the metrics of transfers are on both sides, and a first token that ends its request leaves
    nothing behind.
    """
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        router=RouterSection(policy="round-robin"),
        prefill=PrefillSection(instances=2, num_blocks=64),
        kv_transfer=KVTransferSection(faults="fail=1,on=prefill-0"),
    )
    prompts = draw_prompts(12, 100)
    expected = expected_tokens(oracle, prompts)
    with Cluster(config, tmp_path) as running:
        answers = asyncio.run(run_streams(running, prompts, at_once=1))
        assert [answer.error for answer in answers] == [None] * len(prompts)
        assert [answer.token_ids for answer in answers] == expected
        assert running.metric("prefill-0", "pd_kv_transfer_failures_total") > 0
        for name in ("bytes", "descriptors", "post_seconds", "wire_seconds", "exposed_seconds"):
            assert running.metric("prefill-1", f"pd_kv_transfer_{name}_count") >= 12
        assert running.metric("prefill-1", "pd_kv_transfer_bytes_sum") > 0
        assert running.metric("prefill-1", "pd_kv_transfer_registered_bytes") > 0
        assert running.metric("decode-0", "pd_kv_transfer_arrival_seconds_count") == 12
        assert running.metric("decode-0", "pd_kv_transfer_received_bytes_total") > 0
        assert running.metric("decode-0", "pd_kv_transfer_failures_total") > 0
        stall_s = running.metric("prefill-1", "pd_prefill_kv_stall_max_seconds")
        with capsys.disabled():
            print(f"\nlongest stall of the engine loop by KV work: {stall_s * 1e3:.3f} ms")
        assert 0 < stall_s < 1.0
        running.wait_idle()
        asyncio.run(check_first_token_ends(running, prompts[0], expected[0][0]))
        running.wait_idle()


async def check_first_token_ends(cluster: Cluster, prompt: list[int], first_token: int) -> None:
    """The stop token is the first one: nothing is decoded, and nothing is sent."""
    before = await asyncio.to_thread(
        cluster.metric, "decode-0", "pd_kv_transfer_arrival_seconds_count"
    )
    async with aiohttp.ClientSession(cluster.base_url) as session:
        answers = [
            await complete(
                session,
                prompt,
                model="tandem-python",
                max_tokens=NUM_TOKENS,
                temperature=0,
                stop_token_ids=[first_token],
            )
            for _ in range(4)
        ]
    assert [answer.finish_reason for answer in answers] == ["stop"] * 4
    after = await asyncio.to_thread(
        cluster.metric, "decode-0", "pd_kv_transfer_arrival_seconds_count"
    )
    assert after == before
