"""The requests of the matrix: one for each feature, and what each is answered."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.matrix.cells import Feature
from tests.matrix.history import Answer, Choice

ROOT = Path(__file__).parents[2]
SHARED = (ROOT / "decode" / "loop.py").read_text(encoding="utf-8")[:900]
NUM_TOKENS = 48
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[a-z]{1,12}$"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}
_SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One streamed request."""

    feature: Feature
    path: str
    body: dict[str, Any]
    tenant: str = ""
    """Whose key it has; empty: the other one's."""
    on_event: Callable[[], None] = field(default=lambda: None, compare=False)


_FIELDS: dict[Feature, dict[str, Any]] = {
    Feature.DRAFTS: {"temperature": 0.0, "ignore_eos": True},
    Feature.GRAMMAR: {**_SAMPLED, "guided_regex": "([a-z]{3,6} ){12}"},
    Feature.CHOICES: {**_SAMPLED, "n": 3, "logprobs": 1, "ignore_eos": True},
    Feature.STOPS: {**_SAMPLED, "stop": ["\n\n", "return"], "ignore_eos": True},
    Feature.LOGPROBS: {"temperature": 1.0, "logprobs": 3, "ignore_eos": True},
    Feature.TOOLS: {
        **_SAMPLED,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    },
    Feature.PREFIX_HIT: {"temperature": 0.0, "ignore_eos": True},
    Feature.TIER: {**_SAMPLED, "service_tier": "max", "ignore_eos": True},
    Feature.TENANT: {**_SAMPLED, "ignore_eos": True},
    Feature.MIGRATION: {**_SAMPLED, "ignore_eos": True, "logprobs": 1},
}
"""Of the request's body, beside what all have."""


def make_ask(feature: Feature, draw: random.Random) -> Ask:
    """A request that has the feature; its prompt is a piece of source, of many steps and blocks."""
    start = draw.randrange(len(SHARED) // 2)
    prompt = SHARED[start : start + draw.randrange(200, 400)]
    if feature is Feature.PREFIX_HIT:
        prompt = SHARED + prompt
    body = {
        **{"model": "tandem-python", "max_tokens": NUM_TOKENS, "seed": draw.getrandbits(32)},
        **{"stream": True, "stream_options": {"include_usage": True}},
        **_FIELDS[feature],
    }
    if feature is Feature.TOOLS:
        chat = {"messages": [{"role": "user", "content": prompt}]}
        return Ask(feature=feature, path="/v1/chat/completions", body={**body, **chat})
    return Ask(
        feature=feature,
        path="/v1/completions",
        body={**body, "prompt": prompt, "return_token_ids": True},
        tenant="other" if feature is Feature.TENANT else "",
    )


async def answer_to(session: aiohttp.ClientSession, ask: Ask, key: str) -> Answer:
    """What came, until the stream ended or broke."""
    answer = Answer([Choice() for _ in range(ask.body.get("n", 1))])
    headers = {"authorization": f"Bearer {key}"}
    try:
        async with session.post(ask.path, json=ask.body, headers=headers) as response:
            if response.status != 200:
                answer.error = (await response.json())["error"]
                return answer
            async for line in response.content:
                if line.strip() == b"data: [DONE]":
                    answer.is_ended = True
                elif line.startswith(b"data: {"):
                    _take(answer, json.loads(line[6:]))
                    ask.on_event()
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = {"code": type(error).__name__, "message": str(error)}
    return answer


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = event["error"]
        return
    answer.usage = event.get("usage") or answer.usage
    for choice in event["choices"]:
        answer.choices[choice["index"]].add(choice)
