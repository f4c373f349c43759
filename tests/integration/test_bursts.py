"""More requests at once than workers can hold: all wait, all are answered, none is refused."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import aiohttp
import pytest

from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
)
from tests.integration.client import Completion, complete
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR

LIMIT_S = 900.0
"""A client's own; nothing here depends on how long it takes."""


def random_prompts(count: int, length: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(300, 4000) for _ in range(length)] for _ in range(count)]


async def complete_all(url: str, prompts: list[list[int]], max_tokens: int) -> list[Completion]:
    """All at once."""
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        calls = (
            complete(session, p, model="tandem-python", max_tokens=max_tokens, temperature=0)
            for p in prompts
        )
        return await asyncio.gather(*calls)


async def chat_all(url: str, count: int) -> list[str | None]:
    """Through the OpenAI SDK, which must not need a retry."""
    import openai

    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
    ) as client:

        async def chat(number: int) -> str | None:
            answer = await client.chat.completions.create(
                model="tandem-python",
                messages=[{"role": "user", "content": f"write function number {number}"}],
                max_tokens=4,
            )
            return answer.choices[0].finish_reason

        return await asyncio.gather(*(chat(number) for number in range(count)))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_queue_in_prefill_that_outlasts_a_transfer_fails_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """150 prompts at one prefill worker, whose queue is longer than `transfer_timeout_s`."""
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR)),
        prefill=PrefillSection(max_num_seqs=4, max_num_batched_tokens=256),
        decode=DecodeSection(num_blocks=1024),
        kv_transfer=KVTransferSection(transfer_timeout_s=3.0),
    )
    with Cluster(config, tmp_path) as cluster:
        begun = time.monotonic()
        answers = asyncio.run(complete_all(cluster.base_url, random_prompts(150, 300), 2))
        elapsed_s = time.monotonic() - begun
        cluster.wait_idle()
    with capsys.disabled():
        print(f"\n150 prompts of 300 tokens: {elapsed_s:.0f} s, transfer_timeout_s = 3\n")
    assert [answer.status for answer in answers] == [200] * 150


@pytest.mark.soak
@pytest.mark.timeout(2000)
def test_600_requests_and_400_chats_at_once_on_the_default_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ClusterConfig(model=ModelSection(path=str(MODEL_DIR)))
    with Cluster(config, tmp_path) as cluster:
        begun = time.monotonic()
        answers = asyncio.run(complete_all(cluster.base_url, random_prompts(600, 20), 4))
        middle = time.monotonic()
        reasons = asyncio.run(chat_all(cluster.base_url, 400))
        ended = time.monotonic()
        cluster.wait_idle()
    with capsys.disabled():
        print(f"\n600 requests: {middle - begun:.0f} s; 400 chats: {ended - middle:.0f} s\n")
    assert [answer.status for answer in answers] == [200] * 600
    assert len(reasons) == 400
    assert set(reasons) <= {"stop", "length"}
