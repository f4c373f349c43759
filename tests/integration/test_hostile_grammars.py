"""Hostile grammars by every path that takes one, beside honest streams: a whole cluster.

The longest gap between two events of the honest streams is printed, beside those of an idle run
and of one with as many requests beside that have no grammar.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
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
from tests.integration.client import Completion, stream
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

BASE = {"model": "tandem-python", "prompt": "def f(", "max_tokens": 120, "ignore_eos": True}
REGEXES = [
    "(([a-z]*)*)*",
    "((([a-z]{0,90}){0,99}){0,99})x",
    "([a-z]{0,50}){0,50}",
    "(([a-z]{2,3}|[a-z]{5,7}){2,9})+z",
    "(a|aa|aaa|[a-z]+)*x",
]
RULES = [
    'root ::= root root | [a-z ] | ""',
    "root ::= a\na ::= b a | b\nb ::= c b | c\nc ::= [a-z ] c | [a-z ]",
]
RIVALS = {"anyOf": [{"type": "string", "minLength": n, "maxLength": 999 - n} for n in range(200)]}
TAGS = [
    {"type": kind, kind: each}
    for kind, many in (("regex", REGEXES), ("grammar", RULES))
    for each in many
]
TAGS += [
    {"type": "star", "content": {"type": "plus", "content": {"type": "any_text", "excludes": []}}}
]


def hostile_bodies() -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of each."""
    fields: list[dict[str, Any]] = []
    for regex in REGEXES:
        fields += [{"guided_regex": regex}, {"regex": regex}]
        fields.append({"structured_outputs": {"regex": regex}})
        schema = {"type": "string", "pattern": regex}
        fields.append({"guided_json": schema})
    for rules in RULES:
        fields += [{"guided_grammar": rules}, {"ebnf": rules}]
        fields.append({"structured_outputs": {"grammar": rules}})
    fields.append({"guided_json": RIVALS})
    fields += [{"response_format": {"type": "structural_tag", "format": tag}} for tag in TAGS]
    bodies = [("/v1/completions", BASE | field) for field in fields]
    for field in [{"regex": regex} for regex in REGEXES] + [{"ebnf": rules} for rules in RULES]:
        params = {"max_new_tokens": 120, "ignore_eos": True, **field}
        bodies.append(("/generate", {"text": "def f(", "sampling_params": params}))
    return bodies


def plain_bodies(count: int) -> list[tuple[str, dict[str, Any]]]:
    """As many without a grammar."""
    return [("/v1/completions", BASE)] * count


async def honest(session: aiohttp.ClientSession, seed: int, gaps: list[float]) -> Completion:
    """A stream, and the seconds between its events."""
    last = time.monotonic()

    def on_event() -> None:
        nonlocal last
        now = time.monotonic()
        gaps.append(now - last)
        last = now

    params: dict[str, Any] = {"temperature": 1, "seed": seed, "max_tokens": 200, "ignore_eos": True}
    if seed % 2:
        params["guided_regex"] = "([a-z]+ )*[a-z]+"
    return await stream(
        session, f"def function_{seed}(x):", on_event=on_event, model="tandem-python", **params
    )


async def run(
    base_url: str, bodies: Sequence[tuple[str, dict[str, Any]]]
) -> tuple[list[Completion], float, list[tuple[int, str]]]:
    """Honest streams, their longest gap, and how hostile requests beside them were answered."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(base_url, connector=connector) as session:

        async def attack(path: str, body: dict[str, Any]) -> tuple[int, str]:
            async with session.post(path, json=body) as response:
                return response.status, await response.text()

        gaps: list[list[float]] = [[] for _ in range(4)]
        streams = [asyncio.create_task(honest(session, n, each)) for n, each in enumerate(gaps)]
        answers = await asyncio.gather(*(attack(path, body) for path, body in bodies))
        return await asyncio.gather(*streams), max(max(each[1:]) for each in gaps), list(answers)


def test_no_grammar_ends_a_worker_or_changes_a_token(tmp_path: Path) -> None:
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR), name="tandem-python", warm_grammars=True),
        router=RouterSection(lease_ttl_s=10.0),
        prefill=PrefillSection(num_blocks=256),
        decode=DecodeSection(num_blocks=256),
        kv_transfer=KVTransferSection(transport="loopback"),
    )
    with Cluster(config, tmp_path) as cluster:
        asyncio.run(run(cluster.base_url, []))  # what is compiled once
        alone, idle_gap_s, _ = asyncio.run(run(cluster.base_url, []))
        beside, gap_s, answers = asyncio.run(run(cluster.base_url, hostile_bodies()))
        num_taken = sum(status == 200 for status, _ in answers)
        _, plain_gap_s, _ = asyncio.run(run(cluster.base_url, plain_bodies(num_taken)))
        cluster.wait_idle()
        cluster.wait_workers(2)
        assert [process.poll() for process in cluster.processes.values()] == [None] * 3
    each = {"idle": idle_gap_s, "beside plain ones": plain_gap_s, "beside hostile ones": gap_s}
    print("longest gap:", ", ".join(f"{name} {1000 * s:.0f} ms" for name, s in each.items()))
    print(sorted(status for status, _ in answers))
    assert [one.error for one in beside] == [None] * len(beside)
    assert [one.token_ids for one in beside] == [one.token_ids for one in alone]
    assert all(status in (200, 400, 429) for status, _ in answers), answers
    assert any("too ambiguous" in text for _, text in answers)
