"""The tokenizer as endpoints: no worker hears of these requests.

Bodies are bounded, counted and worked on in threads like those of generation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import orjson
from aiohttp import web

from router.http.body import read_body
from router.http.endpoints import Serving, backend_for
from router.http.prompts import (
    Abandoned,
    chat_prompt,
    check_chat,
    check_completion,
    completion_prompts,
)
from router.http.response import Json
from router.http.schema import ChatRequest, parse_body
from router.http.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    as_generation,
    text_answer,
    tokens_answer,
)
from router.http.unsupported import refuse_unsupported
from router.model import ModelLimits, ServedModel

BodyT = TypeVar("BodyT", TokenizeRequest, DetokenizeRequest)


class TokenizerEndpoints:
    """Handlers of ``/tokenize`` and ``/detokenize``."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def tokenize(self, request: web.Request) -> web.Response:
        """``POST /tokenize``: the tokens that the model would be given."""

        def answer(
            body: TokenizeRequest, model: ServedModel, limits: ModelLimits, is_abandoned: Abandoned
        ) -> Json:
            token_ids = _token_ids(body, model, limits, is_abandoned)
            return tokens_answer(
                token_ids, model, limits, with_strings=bool(body.return_token_strs)
            )

        return await self._answer(request, TokenizeRequest, answer)

    async def detokenize(self, request: web.Request) -> web.Response:
        """``POST /detokenize``: the text of tokens."""
        return await self._answer(
            request,
            DetokenizeRequest,
            lambda body, model, limits, _: text_answer(body, model, limits),
        )

    async def _answer(
        self,
        request: web.Request,
        body_type: type[BodyT],
        answer: Callable[[BodyT, ServedModel, ModelLimits, Abandoned], Json],
    ) -> web.Response:
        serving = self._serving
        section = serving.section
        with serving.backends.bodies.body() as held:
            raw = await read_body(
                request, held, max_bytes=section.max_body_bytes, timeout_s=section.body_timeout_s
            )

            def work(is_abandoned: Abandoned) -> bytes:
                body = parse_body(raw, body_type)
                backend = backend_for(serving, request, body.model)
                return orjson.dumps(answer(body, backend.model, backend.limits(), is_abandoned))

            data = await serving.lanes.run(len(raw), work)
        return web.Response(body=data, content_type="application/json")


def _token_ids(
    body: TokenizeRequest, model: ServedModel, limits: ModelLimits, is_abandoned: Abandoned
) -> list[int]:
    generation = as_generation(body)
    refuse_unsupported(generation)
    if isinstance(generation, ChatRequest):
        check_chat(generation, model, limits)
        return chat_prompt(generation, model, limits, is_abandoned).token_ids
    check_completion(generation, model, limits)
    prompts = completion_prompts(generation, model, limits, is_abandoned)
    return prompts[0].token_ids if prompts else []
