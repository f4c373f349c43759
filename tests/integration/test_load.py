"""Two hundred concurrent streams with random cancels, and a body that is too large."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
from collections.abc import Iterator

import aiohttp
import pytest

from engine.generate import generate
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from runtime.config import ClusterConfig, ModelSection
from runtime.sampling import SamplingParams
from tests.integration.client import Completion, stream
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_REQUESTS = 200
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = ClusterConfig(model=ModelSection(path=str(MODEL_DIR)))
    with Cluster(config, tmp_path_factory.mktemp("load")) as running:
        yield running
    assert running.marked_processes() == []


@pytest.mark.nightly
def test_200_streams_with_random_cancels(cluster: Cluster, oracle: DeepseekV3ForCausalLM) -> None:
    draw = random.Random(11)
    distinct = [
        [draw.randrange(300, 4000) for _ in range(draw.randrange(1, 150))] for _ in range(20)
    ]
    prompts = [distinct[i % len(distinct)] for i in range(NUM_REQUESTS)]
    cancels = [draw.randrange(1, NUM_TOKENS) if draw.random() < 0.4 else None for _ in prompts]

    async def main() -> list[Completion]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(cluster.base_url, connector=connector) as session:
            requests = (
                stream(
                    session,
                    prompt,
                    cancel_after=cancel,
                    model="tandem-python",
                    max_tokens=NUM_TOKENS,
                    ignore_eos=True,
                    temperature=0,
                )
                for prompt, cancel in zip(prompts, cancels, strict=True)
            )
            return await asyncio.gather(*requests)

    answers = asyncio.run(main())
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    expected = [output.token_ids for output in generate(oracle, distinct, [greedy] * 20)]
    num_whole = 0
    for index, (answer, cancel) in enumerate(zip(answers, cancels, strict=True)):
        assert answer.error is None, answer.error
        tokens = expected[index % len(distinct)]
        assert answer.token_ids == tokens[: len(answer.token_ids)]
        if cancel is None:
            assert answer.token_ids == tokens
            num_whole += 1
    assert 0 < num_whole < NUM_REQUESTS
    cluster.wait_idle()


def test_a_body_of_10_mb_is_refused_with_the_limit(cluster: Cluster) -> None:
    payload = json.dumps({"model": "tandem-python", "prompt": "x" * 10_000_000}).encode()

    # A client that blocks: an event loop would leave behind what the server did not read of 10 MB.
    host, port = cluster.base_url.removeprefix("http://").split(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=60)) as client:
        headers = {"content-type": "application/json"}
        client.request("POST", "/v1/completions", payload, headers)
        response = client.getresponse()
        status, answer = response.status, json.loads(response.read())
    assert status == 413
    assert set(answer["error"]) == {"message", "type", "param", "code", "request_id"}
    assert "8388608" in answer["error"]["message"]
    cluster.wait_idle()
