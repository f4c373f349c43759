"""What a request says of its conversation, and what an answer says of its pair."""

from __future__ import annotations

import hashlib

from aiohttp import web

CONVERSATION_HEADER = "x-conversation-id"
ROUTING_HEADER = "x-tandem-routing"
MAX_ID_CHARS = 128
"""Of a longer id its hash is kept."""


def conversation_of(request: web.Request, prompt_cache_key: str | None) -> str:
    """The conversation of which ``request`` is a turn; empty: it does not say.

    The header counts first, then OpenAI's ``prompt_cache_key``.
    """
    given = request.headers.get(CONVERSATION_HEADER) or prompt_cache_key or ""
    if len(given) > MAX_ID_CHARS:
        return hashlib.blake2b(given.encode(), digest_size=16).hexdigest()
    return given


def wants_routing(request: web.Request) -> bool:
    """Whether the answer is to say why it has its pair."""
    return request.headers.get(ROUTING_HEADER) == "1"
