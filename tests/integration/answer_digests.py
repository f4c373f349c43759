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
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from tests.integration.cluster import Cluster
from tests.integration.test_llama import CONFIGS as LLAMAS
from tests.integration.test_llama import LENGTHS, write_folder
from tests.integration.test_tokens import CONFIGS

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
    prefill, decode = LLAMAS["tp2-to-dp2"]
    model = ModelSection(path=str(write_folder(folder)))
    yield "llama-tp2-to-dp2", ClusterConfig(model=model, prefill=prefill, decode=decode)


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
    with Cluster(config, folder) as cluster:
        (model,) = _fetch(f"{cluster.base_url}/v1/models")["data"]
        for title, body in bodies():
            asked = {"model": model["id"], **COMMON, **body}
            answer = _fetch(f"{cluster.base_url}/v1/completions", asked)
            said = json.dumps([answer["choices"], answer["usage"]], sort_keys=True)
            found[title] = hashlib.sha256(said.encode()).hexdigest()[:16]
    return found


def _fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    """An answer's JSON; HTTPError where it is an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


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
