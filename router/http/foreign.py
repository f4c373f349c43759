"""Endpoints of other APIs, each of which is one of ours in other words.

They translate bodies and answers; everything between is the way of every request.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping

from aiohttp import web

from router.errors import RequestError
from router.http.dialect import Dialect
from router.http.endpoints import OpenAIEndpoints
from router.http.errors import Failure
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
from router.http.responses.answer import Answer, ResponseBody
from router.http.responses.request import ResponsesRequest
from router.http.responses.request import as_chat as as_chat_of_responses
from router.http.responses.request import names_of as names_of_responses
from router.http.responses.stream import ResponseEvents
from router.http.schema import ChatRequest, CompletionRequest, parse_body

_ROOT = re.compile(r"([^.\[]*)(\[\d+\])?")


@contextlib.contextmanager
def told_under(names_of: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Let a refusal name the field that the client sent instead of what it was translated to.

    ``names_of`` gives the client's names by ours, of whole fields and of items of lists.
    """
    try:
        yield
    except RequestError as error:
        found, names = _ROOT.match(error.param or ""), names_of()
        assert found is not None  # the pattern may match nothing, and that it always does
        ours = found.group() if found.group() in names else found.group(1)
        theirs = names.get(ours)
        if theirs is not None and error.param is not None:
            error.param = theirs + error.param.removeprefix(ours)
            if error.message.startswith(ours):
                error.message = theirs + error.message.removeprefix(ours)
        raise


class ForeignEndpoints:
    """Handlers of ``/generate``, ``/v1/messages`` and ``/v1/responses``."""

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

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/responses``, as OpenAI has it."""
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
        with told_under(lambda: names_of_responses(asked)):
            return await self._endpoints.serve_chat(request, parse, form, dialect)
