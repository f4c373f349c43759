"""A small HTTP client of the tests: completions by token ids, streamed or whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(slots=True)
class Completion:
    """What one request was answered with."""

    status: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    request_id: str = ""
    num_cached_tokens: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    """Of an answer that is not streamed."""


async def complete(
    session: aiohttp.ClientSession, prompt: list[int] | str, **params: Any
) -> Completion:
    """POST /v1/completions, whole."""
    body = {"prompt": prompt, "return_token_ids": True, **params}
    async with session.post("/v1/completions", json=body) as response:
        answer = await response.json()
        result = Completion(response.status, request_id=response.headers["x-request-id"])
        if response.status != 200:
            result.error = answer["error"]
            return result
        choice = answer["choices"][0]
        result.token_ids = choice["token_ids"]
        result.text = choice["text"]
        result.finish_reason = choice["finish_reason"]
        result.usage = answer["usage"]
        details = result.usage.get("prompt_tokens_details") or {}
        result.num_cached_tokens = details.get("cached_tokens", 0)
        return result


async def stream(
    session: aiohttp.ClientSession,
    prompt: list[int] | str,
    *,
    cancel_after: int | None = None,
    on_event: Callable[[], None] = lambda: None,
    **params: Any,
) -> Completion:
    """POST /v1/completions, streamed; hang up after ``cancel_after`` events if given.

    ``on_event`` is called after each.
    """
    body = {"prompt": prompt, "return_token_ids": True, "stream": True, **params}
    async with session.post("/v1/completions", json=body) as response:
        result = Completion(response.status, request_id=response.headers["x-request-id"])
        if response.status != 200:
            result.error = (await response.json())["error"]
            return result
        num_events = 0
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                return result
            _add_event(result, json.loads(line[6:]))
            num_events += 1
            on_event()
            if cancel_after is not None and num_events >= cancel_after:
                response.close()
                result.finish_reason = "cancelled"
                return result
    raise AssertionError(f"the stream of {result.request_id} ended without [DONE]")


def _add_event(result: Completion, event: dict[str, Any]) -> None:
    if "error" in event:
        result.error = event["error"]
        return
    for choice in event["choices"]:
        result.token_ids += choice.get("token_ids") or []
        result.text += choice["text"]
        result.finish_reason = choice["finish_reason"] or result.finish_reason


def run_all(
    base_url: str, prompts: list[list[int]], params: list[dict[str, Any]]
) -> list[Completion]:
    """All prompts at once, each with its parameters."""

    async def main() -> list[Completion]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(base_url, connector=connector) as session:
            pairs = zip(prompts, params, strict=True)
            return await asyncio.gather(*(complete(session, p, **q) for p, q in pairs))

    return asyncio.run(main())
