"""Two hundred concurrent streams with random cancels, and input that must be refused."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
from collections.abc import Iterator
from typing import Any

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


@pytest.mark.cluster
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


BASE: dict[str, Any] = {"model": "tandem-python", "prompt": "x = ", "max_tokens": 4}
BAD_BODIES: dict[str, tuple[Any, int, str]] = {
    "too long": ({**BASE, "prompt": [5] * 5000}, 400, "context"),
    "empty prompt": ({**BASE, "prompt": ""}, 400, "prompt"),
    "no tokens": ({**BASE, "prompt": []}, 400, "prompt"),
    "max_tokens 0": ({**BASE, "max_tokens": 0}, 400, "max_tokens"),
    "max_tokens negative": ({**BASE, "max_tokens": -1}, 400, "max_tokens"),
    "unknown model": ({**BASE, "model": "gpt-9"}, 404, "gpt-9"),
    "malformed": (b'{"model": ', 400, "JSON"),
    "not an object": (b"[1, 2]", 400, "object"),
    "10 MB": ({**BASE, "prompt": "x" * 10_000_000}, 413, "8388608"),
    "wrong type": ({**BASE, "temperature": "hot"}, 400, "temperature"),
    "n = 0": ({**BASE, "n": 0}, 400, "n"),
    "temperature": ({**BASE, "temperature": 3}, 400, "temperature"),
    "token id": ({**BASE, "prompt": [10**6]}, 400, "prompt"),
}


@pytest.mark.parametrize("name", sorted(BAD_BODIES))
def test_bad_input_is_refused_with_a_reason(cluster: Cluster, name: str) -> None:
    body, status, word = BAD_BODIES[name]
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()

    # A client that blocks: an event loop would leave behind what the server did not read of 10 MB.
    host, port = cluster.base_url.removeprefix("http://").split(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=60)) as client:
        headers = {"content-type": "application/json"}
        client.request("POST", "/v1/completions", payload, headers)
        response = client.getresponse()
        got_status, answer = response.status, json.loads(response.read())
    assert got_status == status
    assert set(answer["error"]) == {"message", "type", "param", "code", "request_id"}
    assert word in answer["error"]["message"]
    assert cluster.busy() == [] or cluster.wait_idle() is None
