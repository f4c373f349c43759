"""The OpenAI endpoints: from a body to a run, and its answer.

Everything that can be refused is refused before anything is sent or asked of a worker.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from aiohttp import web

from router.errors import NotReadyError
from router.http.access.gate import cache_salt_of, use_of
from router.http.access.routing_headers import conversation_of, wants_routing
from router.http.access.tiers import standing_of
from router.http.apis.dialect import OPENAI, Dialect
from router.http.apis.error_params import errors_named_by
from router.http.call import Call, RequestT, cut_off_reader, cut_off_slow, headers_of
from router.http.openai.chat import ChatBody, ChatStream
from router.http.openai.completions import CompletionBody, CompletionStream, CompletionText
from router.http.openai.conversation import new_reader, tells_reasoning
from router.http.openai.output_rules import rules_of
from router.http.openai.params import (
    choices_per_prompt,
    for_choice,
    for_prompt,
    num_choices,
    sampling_from,
    tokens_asked_for,
)
from router.http.openai.prompts import chat_prompt, check_chat, check_completion, completion_prompts
from router.http.openai.response import Choice, Prompt, ResponseFormat, ResponseInfo
from router.http.openai.schema import ChatRequest, CompletionRequest, parse_body
from router.http.openai.unsupported import refuse_unsupported
from router.http.request_id import REQUEST_ID_KEY
from router.http.request_spans import record_request
from router.http.responder import TIMINGS_HEADER, Responder
from router.http.serving import Serving, backend_for
from router.http.wire.body import read_body
from router.model import ModelLimits, ServedModel
from router.requests.admission import BodyBytes
from router.requests.generation import Generation, Mailbox
from router.requests.run import MAX_PARALLEL, RequestRun
from router.requests.time_limits import limits_from_arrival
from router.text.lanes import Work
from router.text.message import MessageReader
from router.text.output import ChoiceText, OutputOptions
from runtime.budget import earliest
from runtime.trace.context import current_trace

DELIVERY_S = 10.0
"""A client may take its answer for so long after the request's own time is over."""


ReaderOf = Callable[[Prompt], MessageReader | None]
FormOf = Callable[[RequestT, ResponseInfo], ResponseFormat]


class OpenAIEndpoints:
    """Handlers of ``/v1``; those of other APIs translate their bodies and answers for them."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``: what follows a conversation, as OpenAI has it."""

        def form(body: ChatRequest, info: ResponseInfo) -> ResponseFormat:
            tells = tells_reasoning(body, self._serving.backends.choose(body.model).model)
            return ChatStream(info) if body.stream else ChatBody(info, tells_reasoning=tells)

        asked: ChatRequest | None = None

        def parse(raw: bytes) -> ChatRequest:
            nonlocal asked
            asked = parse_body(raw, ChatRequest)
            if asked.tools is not None:
                asked.client_names = asked.tools.names()
            return asked

        with errors_named_by(lambda: {} if asked is None else asked.client_names):
            return await self.serve_chat(request, parse, form)

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

        async def answer(call: Call[ChatRequest]) -> web.StreamResponse:
            body, model, limits = call.body, call.backend.model, call.limits
            has_form = call.rules is not None and call.rules.form is not None
            return await self._answer(
                call,
                lambda is_abandoned: [chat_prompt(body, model, limits, is_abandoned)],
                lambda prompt: new_reader(body, model, prompt, has_form=has_form),
                form_of,
                dialect,
            )

        return await self._serve(request, parse, check, answer)

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

        async def answer(call: Call[CompletionRequest]) -> web.StreamResponse:
            body, model, limits = call.body, call.backend.model, call.limits
            return await self._answer(
                call,
                lambda is_abandoned: completion_prompts(body, model, limits, is_abandoned),
                lambda _: None,
                form_of,
                OPENAI,
            )

        return await self._serve(request, parse, check, answer)

    async def _serve(
        self,
        request: web.Request,
        parse: Callable[[bytes], RequestT],
        check: Callable[[RequestT, ServedModel, ModelLimits], int],
        answer: Callable[[Call[RequestT]], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Let ``request`` in and ``answer`` it, once its body is known to be one that can be."""
        received = time.monotonic()
        serving = self._serving
        with serving.backends.body() as held:
            call = await self._receive(request, parse, check, held, received)
            if call.use is None and call.rules is None:
                return await answer(call)
            asked = tokens_asked_for(call.body, call.num_bytes, call.num_choices)
            async with serving.gate.admit(request, *asked):
                if call.rules is not None:
                    limit = earliest(limits_from_arrival(serving.section, received))
                    made = await call.rules.compile(call.backend.compilers, limit, call.use)
                    call = replace(call, compiled=made)
                return await answer(call)

    async def _receive(
        self,
        request: web.Request,
        parse: Callable[[bytes], RequestT],
        check: Callable[[RequestT, ServedModel, ModelLimits], int],
        held: BodyBytes,
        received: float,
    ) -> Call[RequestT]:
        """The body of ``request``, read and checked; ``check`` says how many prompts it holds.

        All that can be refused without a tokenizer is refused here, and all while a cluster starts.
        """
        serving, section = self._serving, self._serving.section
        raw = await read_body(
            request, held, max_bytes=section.max_body_bytes, timeout_s=section.body_timeout_s
        )

        use = use_of(request)

        def checked(_: object) -> Call[RequestT]:
            body = parse(raw)
            backend = backend_for(serving, request, body.model)
            limits = backend.limits()
            refuse_unsupported(body)
            key = None if use is None else use.record
            standing = standing_of(body, serving.tiers, key, max_priority=section.max_priority)
            sampling = sampling_from(body, limits)
            most = section.max_choices_per_request
            return Call(
                request=request,
                request_id=request[REQUEST_ID_KEY],
                body=body,
                backend=backend,
                limits=limits,
                sampling=sampling,
                rules=rules_of(body, backend.model),
                standing=standing,
                num_choices=num_choices(body, check(body, backend.model, limits), most),
                use=use,
                received=received,
                held=held,
                num_bytes=len(raw),
            )

        call = await serving.lanes.run(len(raw), checked, use)
        readiness = call.backend.readiness
        if readiness.was_ready:
            return call
        if not await readiness.first_pair():
            missing = ", ".join(readiness.missing())
            raise NotReadyError(f"the cluster is starting: {missing}. Fix: retry in a moment")
        return await serving.lanes.run(len(raw), checked, use)  # by the limits of its workers

    async def _answer(
        self,
        call: Call[RequestT],
        prompts_of: Work[list[Prompt]],
        reader_of: ReaderOf,
        form_of: FormOf[RequestT],
        dialect: Dialect,
    ) -> web.StreamResponse:
        """Wait for a place, make tokens, run."""
        serving, body, backend = self._serving, call.body, call.backend
        async with backend.admission.admit(
            min(call.num_choices, MAX_PARALLEL),
            partial(limits_from_arrival, serving.section, call.received),
            standing=call.standing,
            num_bytes=call.held.num_bytes,
        ) as place:
            prompts = await serving.lanes.run(call.num_bytes, prompts_of, call.use)
            call.held.release()
            info = _info_of(call)
            mailbox = Mailbox(serving.section.max_mailbox_bytes, lambda: cut_off_reader(call))
            _add_choices(info, call, prompts, mailbox, reader_of)
            for prompt in prompts:
                num_tokens = len(prompt.token_ids)
                backend.metrics.prompt_lengths.observe(num_tokens)
                backend.metrics.prompt_tokens.inc(num_tokens)
                if call.use is not None:
                    call.use.num_prompt_tokens += num_tokens
            generations = [choice.generation for choice in info.choices]
            if call.use is not None:
                call.use.generations = generations
            run = RequestRun(backend.pipeline, mailbox, generations, on_ended=place.give_back)
            form = form_of(body, info)
            return await self._respond(call, run, form, info, dialect)

    async def _respond(
        self,
        call: Call[RequestT],
        run: RequestRun,
        form: ResponseFormat,
        info: ResponseInfo,
        dialect: Dialect,
    ) -> web.StreamResponse:
        """The answer; who takes longer for it than the request may is cut off."""
        serving = self._serving
        deadline = call.received + serving.section.request_timeout_s
        slow = asyncio.get_running_loop().call_at(deadline + DELIVERY_S, cut_off_slow, call)
        try:
            async with run:
                responder = Responder(
                    run,
                    info,
                    form,
                    call.backend.metrics,
                    dialect=dialect,
                    keep_alive_s=serving.section.keep_alive_s,
                    headers=headers_of(call),
                )
                if call.body.stream:
                    return await responder.stream(call.request, call.request_id)
                return await responder.body(call.request_id)
        finally:
            slow.cancel()
            if serving.spans is not None:
                record_request(serving.spans, current_trace(), info, time.monotonic())
            serving.finished.add(info.choices[0].generation, time.time(), call.backend.name)


def _add_choices(
    info: ResponseInfo,
    call: Call[RequestT],
    prompts: Sequence[Prompt],
    mailbox: Mailbox,
    reader_of: ReaderOf,
) -> None:
    """Prompt i's choice j is number ``i * n + j``."""
    body, limits = call.body, call.limits
    unique = f"{call.request_id}.{os.urandom(4).hex()}"  # two clients may send the same id
    for prompt in prompts:
        capped = for_prompt(call.sampling, len(prompt.token_ids), limits, param=call.param)
        if call.compiled is not None:
            capped = replace(capped, constraint=call.compiled.constraint(prompt.model_start))
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
                cache_salt=cache_salt_of(call.use, body.cache_salt),
                mailbox=mailbox,
                received=call.received,
                conversation=conversation_of(call.request, body.prompt_cache_key),
                explain=info.wants_routing,
                standing=call.standing,
                key_name=call.use.record.name if call.use else "",
            )
            text = ChoiceText(info.vocabulary, options, reader_of(prompt))
            choice = Choice(index=index, prompt=prompt, generation=generation, text=text)
            info.choices.append(choice)


def _info_of(call: Call[RequestT]) -> ResponseInfo:
    """What the form of an answer must know of its request."""
    body = call.body
    return ResponseInfo(
        response_id=f"{call.kind}-{call.request_id}",
        created=int(time.time()),
        model=call.backend.name,
        vocabulary=call.backend.model.tokenizer.vocabulary,
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
