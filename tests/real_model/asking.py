"""Requests of a real model's cluster, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp

MODEL = "smollm2"
TIMEOUT = aiohttp.ClientTimeout(total=900)


def ask_all(base_url: str, path: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """POST each body, with temperature 0 and token ids wanted; the answers in their order."""

    async def ask(session: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
        whole = {"model": MODEL, "temperature": 0, "return_token_ids": True, **body}
        async with session.post(path, json=whole) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer

    async def main() -> list[dict[str, Any]]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(base_url, connector=connector, timeout=TIMEOUT) as session:
            return await asyncio.gather(*(ask(session, body) for body in bodies))

    return asyncio.run(main())


def ask_chat(base_url: str, **body: Any) -> dict[str, Any]:
    """One conversation's answer."""
    (answer,) = ask_all(base_url, "/v1/chat/completions", [body])
    return answer
