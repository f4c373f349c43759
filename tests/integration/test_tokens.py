"""The tokens of a split cluster are the tokens of one process.

Each cluster is configured so that the named mechanism must take part, and the test checks that it
did where a counter shows it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
)
from runtime.sampling import SamplingParams
from tests.integration.client import Completion, run_all
from tests.integration.cluster import NO_DRAFTS, Cluster
from tests.integration.conftest import MODEL_DIR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_TOKENS = 24
NUM_GROWN = 140

GREEDY = {"temperature": 0}
SEEDED = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}
SAMPLING: dict[str, dict[str, Any]] = {"greedy": GREEDY, "seeded": SEEDED}


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
        decode=DecodeSection(dp=2, num_blocks=128, overlap_steps="on"),
    ),
    "drafts": ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        prefill=PrefillSection(
            tp=2, num_blocks=128, max_num_batched_tokens=128, overlap_steps="on"
        ),
        decode=DecodeSection(dp=2, num_blocks=128, overlap_steps="on", num_speculative_tokens=2),
    ),
    "overlapped-steps": ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        prefill=PrefillSection(
            tp=2, num_blocks=128, max_num_batched_tokens=128, overlap_steps="on"
        ),
        decode=DecodeSection(
            dp=2, num_blocks=128, overlap_steps="on", num_speculative_tokens=NO_DRAFTS
        ),
    ),
}


OTHERS = frozenset({"dp2-ep2-to-dp2-ep2", "overlapped-steps", "tp2-to-dp2-ep2"})
"""Those with overlapped steps and drafts are in `make test`; these are in `make nightly`."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.nightly] if name in OTHERS else [])
        for name in sorted(CONFIGS)
    ],
)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    with Cluster(CONFIGS[request.param], folder) as running:
        yield running
    assert running.marked_processes() == []


@pytest.fixture(scope="module")
def one_process(
    oracle: DeepseekV3ForCausalLM, prompts: list[list[int]]
) -> dict[str, list[list[int]]]:
    """What one process gives for all prompts, by the name of the sampling."""
    return {name: expected_tokens(oracle, prompts, extra) for name, extra in SAMPLING.items()}


@pytest.mark.parametrize("sampling", SAMPLING)
def test_split_equals_one_process(
    one_process: dict[str, list[list[int]]],
    cluster: Cluster,
    prompts: list[list[int]],
    sampling: str,
) -> None:
    expected = one_process[sampling]
    params = requests_for(prompts, SAMPLING[sampling])
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
    else:
        for prompt, completion in zip(prompts, again, strict=True):
            assert completion.num_cached_tokens == (len(prompt) - 1) // 64 * 64
    if cluster.config.decode.num_speculative_tokens:
        num_tokens = cluster.metric("decode-0", "pd_decode_generated_tokens_total")
        num_rows = cluster.metric("decode-0", "pd_decode_batch_size_sum")
        assert num_tokens > 1.2 * num_rows, "hardly a draft was right"
    cluster.wait_idle()


def test_no_rank_looks_through_what_it_booted_with(cluster: Cluster) -> None:
    ranks = [name for name in cluster.processes if "/" in name]
    assert len(ranks) == cluster.config.prefill.num_ranks + cluster.config.decode.num_ranks
    for name in ranks:
        text = cluster.log_tail(name, num_bytes=1 << 20)
        (found,) = re.findall(r"set aside from the garbage collector objects=(\d+)", text)
        assert int(found) > 10_000, name


async def ask_for_logprobs(url: str, prompt: list[int]) -> dict[str, Any]:
    body = {"model": "tandem-python", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    body |= {"prompt_logprobs": 2, "echo": True, "logprobs": 2}
    async with (
        aiohttp.ClientSession(url) as session,
        session.post("/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        choice: dict[str, Any] = (await response.json())["choices"][0]
        return choice


def test_logprobs_of_prompts_are_those_of_one_process(
    oracle: DeepseekV3ForCausalLM, cluster: Cluster, prompts: list[list[int]]
) -> None:
    """In chunks, over ranks, and also of prompts that the prefix cache knows."""
    longest = sorted(prompts, key=len)[-2:]
    sampling = SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=2)
    expected = [output.prompt_logprobs for output in generate(oracle, longest, sampling)]
    for _ in range(2):
        for prompt, positions in zip(longest, expected, strict=True):
            choice = asyncio.run(ask_for_logprobs(cluster.base_url, prompt))
            first, *entries = choice["prompt_logprobs"]
            assert first is None
            for token_id, entry, position in zip(prompt[1:], entries, positions, strict=True):
                own = entry[str(token_id)]
                assert own["logprob"] == pytest.approx(position.logprob, abs=1e-4)
                # Tokens that are next to equally likely change places by rounding.
                assert own["rank"] == pytest.approx(position.rank, abs=8)
                for top_id, value in zip(position.top_ids, position.top_logprobs, strict=True):
                    assert entry[str(top_id)]["logprob"] == pytest.approx(value, abs=1e-4)
            echoed = choice["logprobs"]["token_logprobs"][1 : len(prompt)]
            told = zip(prompt[1:], entries, strict=True)
            assert echoed == [entry[str(token_id)]["logprob"] for token_id, entry in told]
    cluster.wait_idle()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Prompts of a block that grow to four, and what one process gives for them."""

    prompts: list[list[int]]
    expected: dict[str, list[list[int]]]
    """By the name of the sampling."""


@pytest.fixture(scope="module")
def growth(oracle: DeepseekV3ForCausalLM, prompts: list[list[int]]) -> Growth:
    short = [prompt[:60] for prompt in prompts if len(prompt) >= 60][:2]
    expected = {
        name: expected_tokens(oracle, short, extra, NUM_GROWN) for name, extra in SAMPLING.items()
    }
    return Growth(prompts=short, expected=expected)


@pytest.mark.parametrize(
    ("overlap_steps", "sampling", "num_drafts"),
    [
        ("off", "seeded", 0),
        ("on", "greedy", 0),
        pytest.param("on", "seeded", 2, marks=pytest.mark.nightly),
    ],
)
def test_preemption_took_part(
    growth: Growth, tmp_path: Path, overlap_steps: str, sampling: str, num_drafts: int
) -> None:
    """Two requests run that grow to four blocks each, for which admission expects three."""
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        decode=DecodeSection(
            num_blocks=7,
            enable_prefix_caching=False,
            overlap_steps=overlap_steps,
            num_speculative_tokens=num_drafts,
        ),
    )
    with Cluster(config, tmp_path) as running:
        params = requests_for(growth.prompts, SAMPLING[sampling], NUM_GROWN)
        got = run_all(running.base_url, growth.prompts, params)
        assert_same(got, growth.expected[sampling])
        running.wait_idle()
        assert running.metric("decode-0", "pd_decode_preemptions_total") > 0
