"""A cluster of real processes that picks pairs by what prefix caches hold."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
    RouterSection,
)
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR
from tests.waiting import wait_until

BLOCK = 64
NUM_TOKENS = 8


def by_prefix(**router: Any) -> ClusterConfig:
    return ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        router=RouterSection(policy="predicted-ttft", lease_ttl_s=3.0, **router),
        prefill=PrefillSection(instances=2, num_blocks=128),
        decode=DecodeSection(num_blocks=192, max_num_seqs=16),
        kv_transfer=KVTransferSection(transport="loopback"),
    )


async def ask(
    session: aiohttp.ClientSession, prompt: list[int], **fields: Any
) -> tuple[list[int], int, dict[str, Any]]:
    """Output tokens, cached tokens of the prompt, and why this pair."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    body |= {"return_token_ids": True, **fields}
    headers = {"x-tandem-routing": "1"}
    async with session.post("/v1/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        details = answer["usage"].get("prompt_tokens_details") or {}
        why = json.loads(response.headers["x-tandem-routing"])
        return answer["choices"][0]["token_ids"], details.get("cached_tokens", 0), why


async def ask_until_found(
    session: aiohttp.ClientSession, prompt: list[int], num_blocks: int
) -> dict[str, Any]:
    """Ask a moment later, so that the events are there."""
    end = time.monotonic() + 20.0
    while True:
        _, _, why = await ask(session, prompt)
        if why["best_prefill_blocks"] >= num_blocks or time.monotonic() > end:
            return why


async def ask_of_one_holder(
    session: aiohttp.ClientSession,
) -> tuple[list[int], dict[str, Any]]:
    """Return a prompt whose blocks are at one worker alone, as the index says, and why there.

    Where events are late, or the worker is busy, asking again brings it to the other one, too: then
    another prompt is asked.
    """
    for seed in range(20):
        prompt = text(seed, 5 * BLOCK)
        first = (await ask(session, prompt))[2]
        await asyncio.sleep(0.1 * seed)
        _, _, why = await ask(session, prompt)
        is_found = why["best_prefill_blocks"] >= 4 and why["best_prefill"] == first["prefill"]
        if is_found and why["prefill"] == first["prefill"]:
            return prompt, first
    raise AssertionError(f"no event comes within two seconds: {why}")


def text(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(300, 4000) for _ in range(num_tokens)]


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_a_conversation_goes_back_to_the_worker_that_has_its_kv(tmp_path: Path) -> None:
    with Cluster(by_prefix(), tmp_path) as cluster:
        async with aiohttp.ClientSession(cluster.base_url) as session:
            for conversation in range(3):
                context, served = text(7 + conversation, 3 * BLOCK), ""
                for turn in range(4):
                    held = len(context) // BLOCK - 1
                    output, num_cached, why = await ask(session, context)
                    if turn:
                        assert why["prefill"] == served
                        assert why["prefill_blocks"] >= held - 2
                        assert num_cached >= BLOCK * (held - 2)
                    else:
                        assert why["miss"] == "never seen"
                    served = why["prefill"]
                    context += [*output, *text(100 + 10 * conversation + turn, BLOCK)]
                    # Somebody else.
                    await ask(session, text(1000 + 10 * conversation + turn, 2 * BLOCK))
        cluster.wait_idle()


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_the_blocks_of_a_killed_worker_leave_the_index(tmp_path: Path) -> None:
    with Cluster(by_prefix(), tmp_path) as cluster:
        async with aiohttp.ClientSession(cluster.base_url) as session:
            prompt, first = await ask_of_one_holder(session)
            cluster.kill(first["prefill"])
            cluster.wait_workers(2)
            output, _, why = await ask(session, prompt)
            assert len(output) == NUM_TOKENS
            assert why["prefill"] != first["prefill"]
            assert why["best_prefill"] != first["prefill"]
            assert why["prefill_blocks"] == 0


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_every_http_process_has_the_index(tmp_path: Path) -> None:
    with Cluster(by_prefix(http_processes=2), tmp_path) as cluster:
        prompt = text(2, 5 * BLOCK)
        async with aiohttp.ClientSession(cluster.base_url) as session:
            await ask(session, prompt)
        for _ in range(8):  # each connection may be another process's
            async with aiohttp.ClientSession(cluster.base_url) as session:
                why = await ask_until_found(session, prompt, 4)
                assert why["prefill_blocks"] >= 4
        wait_until(lambda: not cluster.busy(), "nothing is under way")
