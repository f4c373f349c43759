"""What clusters of all layouts answer, bit for bit, before and after a change that must not matter.

``python -m tests.integration.answer_digests FILE`` writes a digest of each answer, and compares
with those that are in FILE already. Log-probabilities count to the last bit, so both are made on
one machine; requests come one by one, since a batch's size decides how float32 is rounded.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from tests.engine.tiny_llama import LLAMA3, llama_config, write_llama
from tests.integration.cluster import Cluster
from tests.integration.test_tokens import CONFIGS
from tests.router.conftest import write_model

LENGTHS = (1, 63, 64, 65, 200)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
COMMON = {"max_tokens": 24, "temperature": 0, "logprobs": 3, "return_token_ids": True}
SEEDED = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}


def layouts(folder: Path) -> Iterator[tuple[str, ClusterConfig]]:
    """Configurations by name; models that are not bundled are written into `folder`."""
    yield from CONFIGS.items()
    bundled = CONFIGS["chunked-prefill"]
    yield (
        "kv-fp8",
        dataclasses.replace(
            bundled,
            prefill=PrefillSection(num_blocks=96, kv_dtype="fp8"),
            decode=DecodeSection(num_blocks=96, kv_dtype="fp8"),
        ),
    )
    folder.mkdir()
    write_model(folder)
    text = json.loads((folder / "config.json").read_text())
    sizes = {"vocab_size": text["vocab_size"], "eos_token_id": text["eos_token_id"]}
    write_llama(folder, llama_config(**sizes, rope_scaling=dict(LLAMA3)), seed=2)
    yield (
        "llama-tp2-to-dp2",
        ClusterConfig(
            model=ModelSection(path=str(folder)),
            prefill=PrefillSection(tp=2, max_num_batched_tokens=96, num_blocks=64),
            decode=DecodeSection(dp=2, num_blocks=64),
        ),
    )


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests by name: each sampling, a hit of the prefix cache, a stop, a grammar, n > 1."""
    draw = random.Random(7)
    prompts = {length: [draw.randrange(10, 300) for _ in range(length)] for length in LENGTHS}
    for length, prompt in prompts.items():
        yield f"greedy-{length}", {"prompt": prompt, "ignore_eos": True}
        yield f"seeded-{length}", {"prompt": prompt, "ignore_eos": True, "seed": length, **SEEDED}
    longest = prompts[max(LENGTHS)]
    yield "prefix-hit", {"prompt": [*longest, 11, 12], "ignore_eos": True}
    # Its choices are steps' batches by chance, which round log-probabilities in other ways.
    yield "three", {"prompt": longest[:40], "n": 3, "seed": 5, "logprobs": None, **SEEDED}
    yield "echoed", {"prompt": longest[:70], "echo": True, "max_tokens": 4}
    yield "stop", {"prompt": longest[:30], "stop": ["e", "1"], "ignore_eos": True}
    schema = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}
    yield "schema", {"prompt": longest[:20], "response_format": schema, "max_tokens": 60}
    yield "pattern", {"prompt": longest[:20], "structured_outputs": {"regex": "[a-f]{3}-[0-9]+"}}


def digests_of(config: ClusterConfig, folder: Path) -> dict[str, str]:
    """A digest of each answer of one cluster, by the request's name."""
    found = {}
    with Cluster(config, folder) as cluster, requests.Session() as session:
        name = session.get(f"{cluster.base_url}/v1/models", timeout=60).json()["data"][0]["id"]
        for title, body in bodies():
            url = f"{cluster.base_url}/v1/completions"
            answer = session.post(url, json={"model": name, **COMMON, **body}, timeout=300).json()
            if "choices" not in answer:
                raise AssertionError(f"{title}: {answer}")
            said = json.dumps([answer["choices"], answer["usage"]], sort_keys=True)
            found[title] = hashlib.sha256(said.encode()).hexdigest()[:16]
    return found


def main() -> int:
    """Write digests, or compare with those that are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    before = json.loads(file.read_text()) if file.exists() else {}
    now = {}
    with tempfile.TemporaryDirectory() as place:
        for layout, config in layouts(Path(place, "llama")):
            now[layout] = digests_of(config, Path(place, layout))
            known = before.get(layout, now[layout])
            differs = sorted(name for name, one in now[layout].items() if known.get(name) != one)
            print(f"{layout}: {len(now[layout])} answers, differ: {differs or 'none'}", flush=True)
    if not before:
        file.write_text(json.dumps(now, indent=1) + "\n")
    return int(bool(before) and before != now)


if __name__ == "__main__":
    sys.exit(main())
