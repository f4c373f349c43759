"""A decode worker dies in the middle of structured outputs: each comes out whole, and the same.

The worker that goes on has never seen the outputs: it tells a new matcher what was said so far.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
    RouterSection,
)
from tests.integration.client import Completion, stream
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR
from tests.integration.test_faults import num_migrations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string", "pattern": "^[a-z_]{30,40}$"}},
    "required": ["text"],
    "additionalProperties": False,
}
HASH = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
SCHEMAS = [TEXT, {"type": "array", "items": HASH, "minItems": 2, "maxItems": 3}] * 3
"""Of the requests, by their seeds. Long strings, as the model fills the gaps between parts."""
NUM_BEGUN = 5
"""Events of more than half of the streams before the worker dies: so it has some of them."""


async def answers(cluster: Cluster, action: Callable[[], None]) -> list[Completion]:
    """Stream all requests; call ``action`` in the middle of their outputs."""
    begun: Counter[int] = Counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(cluster.base_url, connector=connector) as session:
        tasks = []
        for seed, schema in enumerate(SCHEMAS):
            form = {"name": "it", "schema": schema, "strict": True}
            params: dict[str, Any] = {
                "model": "tandem-python",
                "max_tokens": 600,
                "temperature": 1,
                "seed": seed,
                "response_format": {"type": "json_schema", "json_schema": form},
            }
            on_event = functools.partial(begun.update, [seed])
            prompt = f"def function_{seed}(x):"
            tasks.append(asyncio.create_task(stream(session, prompt, on_event=on_event, **params)))
        while 2 * sum(number >= NUM_BEGUN for number in begun.values()) <= len(SCHEMAS):
            assert not all(task.done() for task in tasks), [task.result() for task in tasks]
            await asyncio.sleep(0.01)
        await asyncio.to_thread(action)
        return await asyncio.wait_for(asyncio.gather(*tasks), 400)


def test_a_killed_decode_worker_changes_no_structured_output(tmp_path: Path) -> None:
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR), name="tandem-python"),
        router=RouterSection(lease_ttl_s=2.0),
        prefill=PrefillSection(num_blocks=128),
        decode=DecodeSection(instances=2, num_blocks=128),
        kv_transfer=KVTransferSection(transport="loopback"),
    )
    modules = {"decode": "tests.integration.slow_decode"}
    with Cluster(config, tmp_path, modules=modules) as cluster:
        expected = asyncio.run(answers(cluster, lambda: None))
        assert num_migrations(cluster) == 0
        found = asyncio.run(answers(cluster, lambda: cluster.kill("decode-0/0")))
        assert 0 < num_migrations(cluster) < len(SCHEMAS)
        cluster.wait_workers(2)
        cluster.wait_idle()
    for schema, answer, same in zip(SCHEMAS, found, expected, strict=True):
        assert answer.error is None
        assert answer.finish_reason == "stop", answer
        jsonschema.validate(json.loads(answer.text), schema)
        assert (answer.text, answer.token_ids) == (same.text, same.token_ids)
    assert len({answer.text for answer in found}) == len(SCHEMAS)
