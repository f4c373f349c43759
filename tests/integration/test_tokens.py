"""The tokens of a split cluster are the tokens of one process.

Each cluster is configured so that the named mechanism must take part, and the test checks that it
did where a counter shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.generate import generate
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
)
from runtime.sampling import SamplingParams
from tests.integration.client import Completion, run_all
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
NUM_TOKENS = 24

GREEDY = {"temperature": 0}
SEEDED = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}


def requests_for(
    prompts: list[list[int]], extra: dict[str, Any], num_tokens: int = NUM_TOKENS
) -> list[dict[str, Any]]:
    common = {"model": "tandem-python", "max_tokens": num_tokens, "ignore_eos": True}
    return [{**common, **extra, "seed": 1000 + i} for i in range(len(prompts))]


def expected_tokens(
    oracle: DeepseekV3ForCausalLM,
    prompts: list[list[int]],
    extra: dict[str, Any],
    num_tokens: int = NUM_TOKENS,
) -> list[list[int]]:
    sampling = [
        SamplingParams(max_tokens=num_tokens, seed=1000 + i, **extra) for i in range(len(prompts))
    ]
    return [output.token_ids for output in generate(oracle, prompts, sampling)]


def assert_same(got: list[Completion], expected: list[list[int]]) -> None:
    for index, (completion, tokens) in enumerate(zip(got, expected, strict=True)):
        assert completion.error is None, f"prompt {index}: {completion.error}"
        assert completion.token_ids == tokens, f"prompt {index} differs"
        assert completion.finish_reason == "length"


CONFIGS = {
    "chunked-prefill": ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        prefill=PrefillSection(max_num_batched_tokens=96, num_blocks=96),
        kv_transfer=KVTransferSection(layers_per_group=2),
    ),
    "preemption": ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        # All prompts fit, their growth does not: 14 requests hold 37 blocks and want 10 more.
        decode=DecodeSection(num_blocks=40, enable_prefix_caching=False),
    ),
    "tp2-to-dp2-ep2": ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        prefill=PrefillSection(tp=2, num_blocks=128, max_num_batched_tokens=128),
        decode=DecodeSection(dp=2, num_blocks=128),
    ),
    "dp2-ep2-to-dp2-ep2": ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        prefill=PrefillSection(dp=2, num_blocks=128, max_num_batched_tokens=128),
        decode=DecodeSection(dp=2, num_blocks=128),
        kv_transfer=KVTransferSection(layers_per_group=2),
    ),
    "dp2-ep2-overlapped": ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        prefill=PrefillSection(
            dp=2,
            num_blocks=128,
            max_num_batched_tokens=128,
            overlap_steps="on",
            two_batch_overlap="on",
        ),
        decode=DecodeSection(dp=2, num_blocks=128, overlap_steps="on", two_batch_overlap="on"),
    ),
    "overlapped-steps": ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        prefill=PrefillSection(
            tp=2, num_blocks=128, max_num_batched_tokens=128, overlap_steps="on"
        ),
        decode=DecodeSection(dp=2, num_blocks=128, overlap_steps="on"),
    ),
}


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    with Cluster(CONFIGS[request.param], folder) as running:
        yield running
    assert running.marked_processes() == []


@pytest.mark.parametrize("extra", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_split_equals_one_process(
    cluster: Cluster,
    oracle: DeepseekV3ForCausalLM,
    prompts: list[list[int]],
    extra: dict[str, Any],
) -> None:
    expected = expected_tokens(oracle, prompts, extra)
    params = requests_for(prompts, extra)
    assert_same(run_all(cluster.base_url, prompts, params), expected)
    # Once more: now every whole block of every prompt is a prefix hit where caches are on.
    again = run_all(cluster.base_url, prompts, params)
    assert_same(again, expected)
    num_endpoints = cluster.config.prefill.num_endpoints
    if num_endpoints > 1:
        # Each has a prefix cache of its own, so a prompt may come to one that does not know it.
        for rank in range(num_endpoints):
            tokens = cluster.metric("prefill-0", "pd_prefill_prompt_tokens_total", rank=rank)
            assert tokens > 0, f"rank {rank} computed nothing"
    elif cluster.config.decode.enable_prefix_caching:
        for prompt, completion in zip(prompts, again, strict=True):
            assert completion.num_cached_tokens == (len(prompt) - 1) // 64 * 64
    cluster.wait_idle()


@pytest.mark.parametrize("overlap_steps", ["off", "on"])
def test_preemption_took_part(
    oracle: DeepseekV3ForCausalLM, prompts: list[list[int]], tmp_path: Path, overlap_steps: str
) -> None:
    """Two requests run that grow to five blocks each, for which admission expects three."""
    decode = DecodeSection(num_blocks=7, enable_prefix_caching=False, overlap_steps=overlap_steps)
    config = dataclasses.replace(CONFIGS["preemption"], decode=decode)
    short = [prompt[:60] for prompt in prompts if len(prompt) >= 60][:4]
    with Cluster(config, tmp_path) as running:
        expected = expected_tokens(oracle, short, GREEDY, 200)
        got = run_all(running.base_url, short, requests_for(short, GREEDY, 200))
        assert_same(got, expected)
        running.wait_idle()
        assert running.metric("decode-0", "pd_decode_preemptions_total") > 0
