"""Endpoints of other servers' APIs, each of which is one of ours in other words.

They translate bodies and answers; everything between is the way of every request.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping

from aiohttp import web

from router.errors import RequestError
from router.http.endpoints import OpenAIEndpoints
from router.http.generate import (
    GenerateBody,
    GenerateRequest,
    GenerateStream,
    GenerateText,
    as_completion,
    names_of,
)
from router.http.messages import (
    ANTHROPIC,
    NAMES,
    MessageBody,
    MessagesRequest,
    MessageStream,
    as_chat,
)
from router.http.response import ResponseFormat, ResponseInfo
from router.http.schema import ChatRequest, CompletionRequest, parse_body

_ROOT = re.compile(r"[^.\[]*")


@contextlib.contextmanager
def told_under(names_of: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Let a refusal name the field that the client sent instead of what it was translated to.

    ``names_of`` gives the client's names by ours, of whole fields.
    """
    try:
        yield
    except RequestError as error:
        ours = _ROOT.match(error.param or "")
        root = ours.group() if ours is not None else ""
        theirs = names_of().get(root)
        if theirs is not None and error.param is not None:
            error.param = theirs + error.param.removeprefix(root)
            if error.message.startswith(root):
                error.message = theirs + error.message.removeprefix(root)
        raise


class ForeignEndpoints:
    """Handlers of ``/generate`` and ``/v1/messages``."""

    def __init__(self, endpoints: OpenAIEndpoints) -> None:
        self._endpoints = endpoints

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """``POST /generate``, as SGLang has it."""
        asked = GenerateRequest()

        def parse(raw: bytes) -> CompletionRequest:
            nonlocal asked
            asked = parse_body(raw, GenerateRequest)
            return as_completion(asked)

        def form(body: CompletionRequest, info: ResponseInfo) -> ResponseFormat:
            text = GenerateText(info, asked)
            return GenerateStream(text) if body.stream else GenerateBody(info, text)

        with told_under(lambda: names_of(asked)):
            return await self._endpoints.serve_completion(request, parse, form)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/messages``, as Anthropic has it."""

        def parse(raw: bytes) -> ChatRequest:
            return as_chat(parse_body(raw, MessagesRequest))

        def form(body: ChatRequest, info: ResponseInfo) -> ResponseFormat:
            return MessageStream(info) if body.stream else MessageBody(info)

        with told_under(lambda: NAMES):
            return await self._endpoints.serve_chat(request, parse, form, ANTHROPIC)
