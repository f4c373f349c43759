"""The OpenAI endpoints: from a body to a run, and its answer.

Everything that can be refused is refused before anything is sent or asked of a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from aiohttp import web

from router.backend import Backend
from router.errors import NotReadyError
from router.http.body import read_body
from router.http.chat import ChatBody, ChatStream
from router.http.completions import CompletionBody, CompletionStream, CompletionText
from router.http.conversation import new_reader, tells_reasoning
from router.http.dialect import OPENAI, Dialect
from router.http.gate import (
    cache_salt_of,
    count_output,
    count_prompt,
    key_of,
    limit_headers,
)
from router.http.params import (
    choices_per_prompt,
    for_choice,
    for_prompt,
    num_choices,
    sampling_from,
    tokens_asked_for,
)
from router.http.prompts import chat_prompt, check_chat, check_completion, completion_prompts
from router.http.request_id import REQUEST_ID_KEY
from router.http.request_spans import record_request
from router.http.responder import TIMINGS_HEADER, Responder
from router.http.response import Choice, Prompt, ResponseFormat, ResponseInfo
from router.http.routing_headers import conversation_of, wants_routing
from router.http.schema import ChatRequest, CompletionRequest, parse_body
from router.http.serving import Serving, backend_for
from router.http.tiers import standing_of
from router.http.unsupported import IGNORED_HEADER, ignored_fields, refuse_unsupported
from router.model import ModelLimits, ServedModel
from router.requests.admission import BodyBytes
from router.requests.generation import Generation, Mailbox
from router.requests.run import MAX_PARALLEL, RequestRun
from router.requests.time_limits import limits_from_arrival
from router.text.lanes import Work
from router.text.message import MessageReader
from router.text.output import ChoiceText, OutputOptions
from runtime.logging import get_logger
from runtime.sampling import SamplingParams
from runtime.tiers import Standing
from runtime.trace import current_trace

logger = get_logger(__name__)

DELIVERY_S = 10.0
"""A client may take its answer for so long after the request's own time is over."""


ReaderOf = Callable[[Prompt], MessageReader | None]
RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest)
FormOf = Callable[[RequestT, ResponseInfo], ResponseFormat]


class OpenAIEndpoints:
    """Handlers of ``/v1``; those of other APIs translate their bodies and answers for them."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``: what follows a conversation, as OpenAI has it."""

        def form(body: ChatRequest, info: ResponseInfo) -> ResponseFormat:
            model = self._serving.backends.choose(body.model).model
            tells = tells_reasoning(body, model)
            return ChatStream(info) if body.stream else ChatBody(info, tells_reasoning=tells)

        return await self.serve_chat(request, lambda raw: parse_body(raw, ChatRequest), form)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``: what follows prompts, as OpenAI has it."""

        def form(body: CompletionRequest, info: ResponseInfo) -> ResponseFormat:
            skip = body.skip_special_tokens is not False
            text = CompletionText(info, echo=bool(body.echo), skip_special_tokens=skip)
            return CompletionStream(info, text) if body.stream else CompletionBody(info, text)

        return await self.serve_completion(
            request, lambda raw: parse_body(raw, CompletionRequest), form
        )

    async def serve_chat(
        self,
        request: web.Request,
        parse: Callable[[bytes], ChatRequest],
        form_of: FormOf[ChatRequest],
        dialect: Dialect = OPENAI,
    ) -> web.StreamResponse:
        """Answer the conversation that ``parse`` finds in the body, as ``form_of`` writes it."""

        def check(body: ChatRequest, model: ServedModel, limits: ModelLimits) -> int:
            check_chat(body, model, limits)
            return 1

        async with self._receive(request, parse, check) as call:
            body, model, limits = call.body, call.backend.model, call.limits
            return await self._answer(
                call,
                lambda is_abandoned: [chat_prompt(body, model, limits, is_abandoned)],
                lambda prompt: new_reader(body, model, prompt),
                form_of,
                dialect,
            )

    async def serve_completion(
        self,
        request: web.Request,
        parse: Callable[[bytes], CompletionRequest],
        form_of: FormOf[CompletionRequest],
    ) -> web.StreamResponse:
        """Complete the prompts that ``parse`` finds in the body, as ``form_of`` writes it."""

        def check(body: CompletionRequest, model: ServedModel, limits: ModelLimits) -> int:
            check_completion(body, model, limits)
            return len(body.prompt)

        async with self._receive(request, parse, check) as call:
            body, model, limits = call.body, call.backend.model, call.limits
            return await self._answer(
                call,
                lambda is_abandoned: completion_prompts(body, model, limits, is_abandoned),
                lambda _: None,
                form_of,
                OPENAI,
            )

    @contextlib.asynccontextmanager
    async def _receive(
        self,
        request: web.Request,
        parse: Callable[[bytes], RequestT],
        check: Callable[[RequestT, ServedModel, ModelLimits], int],
    ) -> AsyncIterator[_Call[RequestT]]:
        """The body of ``request``, read and checked; ``check`` says how many prompts it holds.

        All that can be refused without a tokenizer is refused here.
        """
        received = asyncio.get_running_loop().time()
        serving = self._serving
        section = serving.section
        with serving.backends.body() as held:
            raw = await read_body(
                request, held, max_bytes=section.max_body_bytes, timeout_s=section.body_timeout_s
            )

            def checked(_: object) -> _Call[RequestT]:
                body = parse(raw)
                backend = backend_for(serving, request, body.model)
                limits = backend.limits()
                refuse_unsupported(body)
                standing = standing_of(
                    body, serving.tiers, key_of(request), max_priority=section.max_priority
                )
                sampling = sampling_from(body, limits)
                most = section.max_choices_per_request
                return _Call(
                    request=request,
                    request_id=request[REQUEST_ID_KEY],
                    body=body,
                    backend=backend,
                    limits=limits,
                    sampling=sampling,
                    standing=standing,
                    num_choices=num_choices(body, check(body, backend.model, limits), most),
                    received=received,
                    held=held,
                    num_bytes=len(raw),
                )

            call = await serving.lanes.run(len(raw), checked)
            readiness = call.backend.readiness
            if not readiness.was_ready:
                missing = ", ".join(readiness.missing())
                raise NotReadyError(f"the cluster is starting: {missing}. Fix: retry in a moment")
            num_tokens = tokens_asked_for(call.body, len(raw), call.num_choices)
            async with serving.gate.admit(request, num_tokens):
                yield call

    async def _answer(
        self,
        call: _Call[RequestT],
        prompts_of: Work[list[Prompt]],
        reader_of: ReaderOf,
        form_of: FormOf[RequestT],
        dialect: Dialect,
    ) -> web.StreamResponse:
        """Wait for a place, make tokens, run."""
        serving, body, backend = self._serving, call.body, call.backend
        limits = limits_from_arrival(serving.section, call.received)
        async with backend.admission.admit(
            min(call.num_choices, MAX_PARALLEL),
            limits,
            standing=call.standing,
            num_bytes=call.held.num_bytes,
        ) as place:
            prompts = await serving.lanes.run(call.num_bytes, prompts_of)
            call.held.release()
            info = ResponseInfo(
                response_id=f"{call.kind}-{call.request_id}",
                created=int(time.time()),
                model=backend.name,
                vocabulary=backend.model.tokenizer.vocabulary,
                includes_usage=body.includes_usage,
                continuous_usage=body.continuous_usage,
                wants_logprobs=body.logprobs is not None and body.logprobs is not False,
                wants_token_ids=bool(body.return_token_ids),
                wants_prompt_logprobs=body.prompt_logprobs is not None,
                wants_timings=bool(body.timings) or call.request.headers.get(TIMINGS_HEADER) == "1",
                wants_routing=wants_routing(call.request),
                choices_per_prompt=choices_per_prompt(body),
                service_tier=call.standing.tier,
            )
            mailbox = Mailbox(serving.section.max_mailbox_bytes, lambda: _cut_off_reader(call))
            self._add_choices(info, call, prompts, mailbox, reader_of)
            for prompt in prompts:
                backend.metrics.prompt_lengths.observe(len(prompt.token_ids))
                backend.metrics.prompt_tokens.inc(len(prompt.token_ids))
                count_prompt(call.request, len(prompt.token_ids))
            generations = [choice.generation for choice in info.choices]
            run = RequestRun(backend.pipeline, mailbox, generations, on_ended=place.give_back)
            form = form_of(body, info)
            return await self._respond(
                call, run, form, info, dialect=dialect, deadline=limits[0].until
            )

    async def _respond(
        self,
        call: _Call[RequestT],
        run: RequestRun,
        form: ResponseFormat,
        info: ResponseInfo,
        *,
        dialect: Dialect,
        deadline: float,
    ) -> web.StreamResponse:
        """The answer; who takes longer for it than the request may is cut off."""
        serving = self._serving
        try:
            async with asyncio.timeout_at(deadline + DELIVERY_S), run:
                responder = Responder(
                    run,
                    info,
                    form,
                    call.backend.metrics,
                    dialect=dialect,
                    keep_alive_s=serving.section.keep_alive_s,
                    headers=_headers_of(call),
                )
                if call.body.stream:
                    return await responder.stream(call.request, call.request_id)
                return await responder.body()
        except TimeoutError as error:
            _cut_off(call, "it did not take its answer within router.request_timeout_s")
            raise ConnectionAbortedError("the client was too slow") from error
        finally:
            count_output(call.request, sum(each.generation.num_tokens for each in info.choices))
            record_request(serving.spans, current_trace(), info, time.monotonic())
            serving.finished.add(info.choices[0].generation, time.time())

    def _add_choices(
        self,
        info: ResponseInfo,
        call: _Call[RequestT],
        prompts: Sequence[Prompt],
        mailbox: Mailbox,
        reader_of: ReaderOf,
    ) -> None:
        """Prompt i's choice j is number ``i * n + j``."""
        body, limits = call.body, call.limits
        # Another id than the client's: two clients may send the same, and workers know it alone.
        unique = f"{call.request_id}.{secrets.token_hex(4)}"
        for prompt in prompts:
            capped = for_prompt(call.sampling, len(prompt.token_ids), limits, param=call.param)
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
                    cache_salt=cache_salt_of(call.request, body.cache_salt),
                    mailbox=mailbox,
                    received=call.received,
                    conversation=conversation_of(call.request, body.prompt_cache_key),
                    explain=info.wants_routing,
                    standing=call.standing,
                )
                text = ChoiceText(info.vocabulary, options, reader_of(prompt))
                choice = Choice(index=index, prompt=prompt, generation=generation, text=text)
                info.choices.append(choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call(Generic[RequestT]):
    """One call of a generation endpoint."""

    request: web.Request
    request_id: str
    body: RequestT
    backend: Backend
    limits: ModelLimits
    """Of its model and workers, when the body was read."""
    sampling: SamplingParams
    standing: Standing
    num_choices: int
    """Of all prompts."""
    received: float
    held: BodyBytes
    num_bytes: int
    """Of the body."""

    @property
    def kind(self) -> str:
        """What the response's id begins with."""
        return "chatcmpl" if isinstance(self.body, ChatRequest) else "cmpl"

    @property
    def param(self) -> str:
        """The field with the prompt."""
        return "messages" if isinstance(self.body, ChatRequest) else "prompt"


def _headers_of(call: _Call[RequestT]) -> dict[str, str]:
    """What the answer says of the request."""
    headers, ignored = limit_headers(call.request), ignored_fields(call.body)
    if not ignored:
        return headers
    logger.debug("ignored fields request_id=%s fields=%s", call.request_id, ignored)
    return {**headers, IGNORED_HEADER: ", ".join(ignored)}


def _cut_off_reader(call: _Call[RequestT]) -> None:
    _cut_off(call, "more output than router.max_mailbox_bytes waits for it")


def _cut_off(call: _Call[RequestT], reason: str) -> None:
    """End the connection of a client that does not read; that cancels its request."""
    logger.warning("a client is cut off request_id=%s reason=%r", call.request_id, reason)
    if call.request.transport is not None:
        call.request.transport.abort()
