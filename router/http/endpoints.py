"""The OpenAI endpoints: from a body to a run, and its answer.

Everything that can be refused is refused before anything is sent or asked of a worker.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from router.http.chat import ChatBody, ChatStream
from router.http.completions import CompletionBody, CompletionStream, CompletionText
from router.http.errors import RequestError
from router.http.params import (
    ModelLimits,
    check_token_ids,
    for_choice,
    for_prompt,
    num_choices,
    sampling_from,
)
from router.http.responder import KEEP_ALIVE_S, TIMINGS_HEADER, Responder
from router.http.response import Choice, Prompt, ResponseFormat, ResponseInfo
from router.http.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_body,
)
from router.metrics import RouterMetrics
from router.model import ServedModel
from router.pool.view import PoolView
from router.requests.admission import Admission
from router.requests.generation import Generation, Mailbox
from router.requests.pipeline import Pipeline
from router.requests.run import RequestRun
from router.text.output import ChoiceText, OutputOptions

REQUEST_ID_KEY: web.RequestKey[str] = web.RequestKey("request_id", str)
MAX_PROMPTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What handlers work with; one per router process."""

    model: ServedModel
    pool: PoolView
    pipeline: Pipeline
    admission: Admission
    metrics: RouterMetrics
    keep_alive_s: float = KEEP_ALIVE_S

    def limits(self) -> ModelLimits:
        """Of the model and of the workers that are there."""
        return self.model.limits_with(self.pool.members())


FormOf = Callable[[ResponseInfo], ResponseFormat]


class OpenAIEndpoints:
    """Handlers of ``/v1``."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        received = asyncio.get_running_loop().time()
        body = parse_body(await request.read(), ChatRequest)
        self._check_model(body.model)
        prompt = await self._chat_prompt(body)

        def form(info: ResponseInfo) -> ResponseFormat:
            return ChatStream(info) if body.stream else ChatBody(info)

        call = _Call(request, body, received, kind="chatcmpl", param="messages")
        return await self._answer(call, [prompt], form, wants_logprobs=bool(body.logprobs))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        received = asyncio.get_running_loop().time()
        body = parse_body(await request.read(), CompletionRequest)
        self._check_model(body.model)
        prompts = await self._completion_prompts(body)

        def form(info: ResponseInfo) -> ResponseFormat:
            skip = body.skip_special_tokens is not False
            text = CompletionText(info, echo=bool(body.echo), skip_special_tokens=skip)
            return CompletionStream(info, text) if body.stream else CompletionBody(info, text)

        call = _Call(request, body, received, kind="cmpl", param="prompt")
        return await self._answer(call, prompts, form, wants_logprobs=body.logprobs is not None)

    async def models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``."""
        return web.json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        """``GET /v1/models/{id}``; ids contain slashes."""
        self._check_model(request.match_info["model"])
        return web.json_response(self._model_card())

    def _model_card(self) -> dict[str, object]:
        serving = self._serving
        return {
            "id": serving.model.name,
            "object": "model",
            "created": serving.model.created,
            "owned_by": "tandem",
            "max_model_len": serving.limits().max_model_len,
        }

    def _check_model(self, name: str | None) -> None:
        served = self._serving.model.name
        if name is not None and name != served:
            raise RequestError(
                f"model = {name!r} does not exist here. Fix: send model = {served!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    async def _chat_prompt(self, body: ChatRequest) -> Prompt:
        model = self._serving.model
        if model.chat_template is None:
            raise RequestError(
                f"the model {model.name!r} has no chat template. Fix: use /v1/completions"
            )
        continues = bool(body.continue_final_message or body.messages[-1].get("prefix"))
        control = model.control_text
        text = model.chat_template.render(
            control.mark_messages(body.messages),
            tools=control.mark(body.tools) if body.tool_choice != "none" else None,
            continue_final_message=continues,
            extra=control.mark(body.chat_template_kwargs),
        )
        # The template has written the special tokens, and only it may.
        parts = control.parts(text)
        ids = await model.tokenizer.encode_parts_async(parts)
        return Prompt(token_ids=ids, text="".join(parts))

    async def _completion_prompts(self, body: CompletionRequest) -> list[Prompt]:
        if len(body.prompt) > MAX_PROMPTS:
            raise RequestError(
                f"prompt has {len(body.prompt)} prompts. Fix: send at most {MAX_PROMPTS} at once",
                param="prompt",
            )
        limits = self._serving.limits()
        tokenizer = self._serving.model.tokenizer
        special = body.add_special_tokens is not False
        prompts = []
        for item in body.prompt:
            if isinstance(item, str):
                # An empty text stays empty, also where the tokenizer would add a token of its own.
                ids = await tokenizer.encode_async(item, add_special_tokens=special) if item else []
                prompts.append(Prompt(token_ids=ids, text=item))
            else:
                check_token_ids(item, limits, param="prompt")
                prompts.append(Prompt(token_ids=item))
        return prompts

    async def _answer(
        self, call: _Call, prompts: Sequence[Prompt], form_of: FormOf, *, wants_logprobs: bool
    ) -> web.StreamResponse:
        serving, body = self._serving, call.body
        info = ResponseInfo(
            response_id=f"{call.kind}-{call.request_id}",
            created=int(time.time()),
            model=serving.model.name,
            vocabulary=serving.model.tokenizer.vocabulary,
            includes_usage=body.includes_usage,
            continuous_usage=body.continuous_usage,
            wants_logprobs=wants_logprobs,
            wants_token_ids=bool(body.return_token_ids),
            wants_timings=bool(body.timings) or call.request.headers.get(TIMINGS_HEADER) == "1",
            choices_per_prompt=num_choices(body),
        )
        mailbox = Mailbox()
        self._add_choices(info, call, prompts, mailbox)
        for prompt in prompts:
            serving.metrics.prompt_lengths.observe(len(prompt.token_ids))
            serving.metrics.prompt_tokens.inc(len(prompt.token_ids))
        generations = [choice.generation for choice in info.choices]
        run = RequestRun(serving.pipeline, mailbox, generations)
        with serving.admission.admit(run.num_parallel):
            return await self._respond(call, run, info, form_of(info))

    async def _respond(
        self, call: _Call, run: RequestRun, info: ResponseInfo, form: ResponseFormat
    ) -> web.StreamResponse:
        serving = self._serving
        async with run:
            responder = Responder(
                run, info, form, serving.metrics, keep_alive_s=serving.keep_alive_s
            )
            if call.body.stream:
                return await responder.stream(call.request, call.request_id)
            return await responder.body()

    def _add_choices(
        self, info: ResponseInfo, call: _Call, prompts: Sequence[Prompt], mailbox: Mailbox
    ) -> None:
        """Prompt i's choice j is number ``i * n + j``."""
        body, limits = call.body, self._serving.limits()
        base = sampling_from(body, limits)
        # Another id than the client's: two clients may send the same, and workers know it alone.
        unique = f"{call.request_id}.{secrets.token_hex(4)}"
        for prompt in prompts:
            capped = for_prompt(base, len(prompt.token_ids), limits, param=call.param)
            options = OutputOptions(
                stops=body.stop,
                include_stop=bool(body.include_stop_str_in_output),
                skip_special_tokens=body.skip_special_tokens is not False,
                min_tokens=capped.min_tokens,
                keep_tokens=info.wants_logprobs or info.wants_token_ids,
            )
            for number in range(info.choices_per_prompt):
                index = len(info.choices)
                generation = Generation(
                    request_id=f"{unique}.{index}",
                    index=index,
                    prompt_token_ids=prompt.token_ids,
                    sampling=for_choice(capped, number),
                    cache_salt=body.cache_salt or "",
                    mailbox=mailbox,
                    received=call.received,
                )
                text = ChoiceText(info.vocabulary, options)
                info.choices.append(
                    Choice(index=index, prompt=prompt, generation=generation, text=text)
                )


class _Call:
    """One call of a generation endpoint."""

    def __init__(
        self,
        request: web.Request,
        body: GenerationRequest,
        received: float,
        *,
        kind: str,
        param: str,
    ) -> None:
        self.request = request
        self.request_id = request[REQUEST_ID_KEY]
        self.body = body
        self.received = received
        self.kind = kind
        self.param = param


_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_of(request: web.Request) -> str:
    """The client's x-request-id where it is a plain word, else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if _VALID_REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
