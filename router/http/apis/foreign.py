"""Endpoints of other APIs, each of which is one of ours in other words.

They translate bodies and answers; everything between is the way of every request.
"""

from __future__ import annotations

from aiohttp import web

from router.http.apis.dialect import Dialect
from router.http.apis.error_params import errors_named_by
from router.http.apis.generate import (
    GenerateBody,
    GenerateRequest,
    GenerateStream,
    GenerateText,
    as_completion,
    names_of,
)
from router.http.apis.messages.answer import ANTHROPIC, MessageBody, MessageStream
from router.http.apis.messages.request import MessagesRequest, as_chat
from router.http.apis.messages.request import names_of as names_of_messages
from router.http.apis.responses.answer import Answer, ResponseBody
from router.http.apis.responses.request import ResponsesRequest
from router.http.apis.responses.request import as_chat as as_chat_of_responses
from router.http.apis.responses.request import names_of as names_of_responses
from router.http.apis.responses.stream import ResponseEvents
from router.http.endpoints import OpenAIEndpoints
from router.http.errors import Failure
from router.http.openai.response import ResponseFormat, ResponseInfo
from router.http.openai.schema import ChatRequest, CompletionRequest, parse_body
from router.http.serving import Serving, backend_for


class ForeignEndpoints:
    """Handlers of ``/generate``, ``/v1/messages`` and ``/v1/responses``."""

    def __init__(self, endpoints: OpenAIEndpoints, serving: Serving) -> None:
        self._endpoints = endpoints
        self._serving = serving

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """``POST /generate``: what follows prompts, as SGLang has it."""
        asked = GenerateRequest()

        def parse(raw: bytes) -> CompletionRequest:
            nonlocal asked
            asked = parse_body(raw, GenerateRequest)
            return as_completion(asked)

        def form(body: CompletionRequest, info: ResponseInfo) -> ResponseFormat:
            text = GenerateText(info, asked)
            return GenerateStream(text) if body.stream else GenerateBody(info, text)

        with errors_named_by(lambda: names_of(asked)):
            return await self._endpoints.serve_completion(request, parse, form)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/messages``: what follows a conversation, as Anthropic has it."""
        asked: MessagesRequest | None = None

        def parse(raw: bytes) -> ChatRequest:
            nonlocal asked
            asked = parse_body(raw, MessagesRequest)
            return as_chat(asked, backend_for(self._serving, request, asked.model).model)

        def form(body: ChatRequest, info: ResponseInfo) -> ResponseFormat:
            return MessageStream(info) if body.stream else MessageBody(info)

        with errors_named_by(lambda: names_of_messages(asked)):
            return await self._endpoints.serve_chat(request, parse, form, ANTHROPIC)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/responses``: what follows items, as OpenAI has it; nothing is stored."""
        asked: ResponsesRequest | None = None
        answer: ResponseEvents | None = None

        def parse(raw: bytes) -> ChatRequest:
            nonlocal asked
            asked = parse_body(raw, ResponsesRequest)
            return as_chat_of_responses(asked)

        def form(body: ChatRequest, info: ResponseInfo) -> ResponseFormat:
            nonlocal answer
            assert asked is not None
            if not body.stream:
                return ResponseBody(Answer(asked, info))
            answer = ResponseEvents(Answer(asked, info))
            return answer

        def event_of(failure: Failure, request_id: str) -> bytes:
            assert answer is not None
            return answer.failed(failure, request_id)

        dialect = Dialect(failure=Failure.body, event_of=event_of, done=b"")
        with errors_named_by(lambda: names_of_responses(asked)):
            return await self._endpoints.serve_chat(request, parse, form, dialect)
