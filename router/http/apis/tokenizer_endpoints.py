"""The tokenizer as endpoints, by the names that several APIs have for it. No worker hears of them.

Bodies are bounded, counted and worked on in threads like those of generation, and each is a request
of its key's limits, for no token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson
from aiohttp import web

from router.backend import Backend
from router.http.access.gate import use_of
from router.http.apis.error_params import errors_named_by
from router.http.apis.messages.request import CountRequest
from router.http.apis.messages.request import as_chat as chat_of_messages
from router.http.apis.messages.request import names_of as names_of_messages
from router.http.apis.responses.request import InputRequest
from router.http.apis.responses.request import as_chat as chat_of_responses
from router.http.apis.responses.request import names_of as names_of_responses
from router.http.apis.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    as_generation,
    text_answer,
    tokens_answer,
)
from router.http.openai.hints import IGNORED_HEADER
from router.http.openai.prompts import (
    Abandoned,
    chat_prompt,
    check_chat,
    check_completion,
    completion_prompts,
)
from router.http.openai.response import Json
from router.http.openai.schema import ChatRequest, CompletionRequest, parse_body
from router.http.openai.unsupported import ignored_fields, refuse_unsupported
from router.http.serving import Serving, backend_for
from router.http.wire.body import read_body
from router.model import ModelLimits, ServedModel

Answer = tuple[Json, Sequence[str]]
"""A body, and the fields of the request that were ignored."""
Work = Callable[[bytes, Abandoned], Answer]


class TokenizerEndpoints:
    """Handlers of ``/tokenize``, ``/detokenize`` and of what counts the tokens of a prompt."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def tokenize(self, request: web.Request) -> web.Response:
        """``POST /tokenize``: the tokens that the model would be given."""

        def answer(raw: bytes, is_abandoned: Abandoned) -> Answer:
            body = parse_body(raw, TokenizeRequest)
            backend = backend_for(self._serving, request, body.model)
            model, limits = backend.model, backend.limits()
            generation = as_generation(body)
            token_ids = _token_ids(generation, model, limits, is_abandoned)
            with_strings = bool(body.return_token_strs)
            found = tokens_answer(token_ids, model, limits, with_strings=with_strings)
            return found, ignored_fields(generation, model)

        return await self._answer(request, answer)

    async def detokenize(self, request: web.Request) -> web.Response:
        """``POST /detokenize``: the text of tokens."""

        def answer(raw: bytes, _: Abandoned) -> Answer:
            body = parse_body(raw, DetokenizeRequest)
            backend = backend_for(self._serving, request, body.model)
            return text_answer(body, backend.model, backend.limits()), ()

        return await self._answer(request, answer)

    async def count_of_messages(self, request: web.Request) -> web.Response:
        """``POST /v1/messages/count_tokens``: how many tokens a prompt has, as Anthropic has it."""
        asked: CountRequest | None = None

        def answer(raw: bytes, is_abandoned: Abandoned) -> Answer:
            nonlocal asked
            asked = parse_body(raw, CountRequest)
            backend = backend_for(self._serving, request, asked.model)
            chat = chat_of_messages(asked, backend.model)
            num_tokens = _num_tokens(chat, backend, is_abandoned)
            return {"input_tokens": num_tokens}, ignored_fields(chat, backend.model)

        with errors_named_by(lambda: names_of_messages(asked)):
            return await self._answer(request, answer)

    async def count_of_responses(self, request: web.Request) -> web.Response:
        """``POST /v1/responses/input_tokens``: how many tokens a prompt has, as OpenAI has it."""
        asked: InputRequest | None = None

        def answer(raw: bytes, is_abandoned: Abandoned) -> Answer:
            nonlocal asked
            asked = parse_body(raw, InputRequest)
            backend = backend_for(self._serving, request, asked.model)
            chat = chat_of_responses(asked)
            num_tokens = _num_tokens(chat, backend, is_abandoned)
            counted: Json = {"object": "response.input_tokens", "input_tokens": num_tokens}
            return counted, ignored_fields(chat, backend.model)

        with errors_named_by(lambda: names_of_responses(asked)):
            return await self._answer(request, answer)

    async def _answer(self, request: web.Request, answer: Work) -> web.Response:
        serving, section, use = self._serving, self._serving.section, use_of(request)
        with serving.backends.body() as held:
            raw = await read_body(
                request, held, max_bytes=section.max_body_bytes, timeout_s=section.body_timeout_s
            )

            def work(is_abandoned: Abandoned) -> tuple[bytes, Sequence[str]]:
                body, ignored = answer(raw, is_abandoned)
                return orjson.dumps(body), ignored

            async with serving.gate.admit(request):
                data, ignored = await serving.lanes.run(len(raw), work, use)
        headers = dict(use.headers) if use is not None else {}
        if ignored:
            headers[IGNORED_HEADER] = ", ".join(ignored)
        return web.Response(body=data, content_type="application/json", headers=headers)


def _num_tokens(chat: ChatRequest, backend: Backend, is_abandoned: Abandoned) -> int:
    return len(_token_ids(chat, backend.model, backend.limits(), is_abandoned))


def _token_ids(
    generation: ChatRequest | CompletionRequest,
    model: ServedModel,
    limits: ModelLimits,
    is_abandoned: Abandoned,
) -> list[int]:
    refuse_unsupported(generation)
    if isinstance(generation, ChatRequest):
        check_chat(generation, model, limits)
        return chat_prompt(generation, model, limits, is_abandoned).token_ids
    check_completion(generation, model, limits)
    prompts = completion_prompts(generation, model, limits, is_abandoned)
    return prompts[0].token_ids if prompts else []
