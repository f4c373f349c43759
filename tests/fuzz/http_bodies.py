"""Targets: bodies of all HTTP APIs, read and checked as endpoints do before they ask a worker."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import orjson
import tokenizers

from router.errors import RequestError
from router.http.access.tiers import standing_of
from router.http.apis.error_params import errors_named_by
from router.http.apis.generate import GenerateRequest, as_completion
from router.http.apis.generate import names_of as names_of_generate
from router.http.apis.messages.request import CountRequest, MessagesRequest
from router.http.apis.messages.request import as_chat as chat_of_messages
from router.http.apis.messages.request import names_of as names_of_messages
from router.http.apis.responses.request import InputRequest, ResponsesRequest
from router.http.apis.responses.request import as_chat as chat_of_responses
from router.http.apis.responses.request import names_of as names_of_responses
from router.http.apis.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    as_generation,
    text_answer,
    tokens_answer,
)
from router.http.errors import failure_from
from router.http.experts import Asked
from router.http.openai.conversation import new_reader
from router.http.openai.output_rules import rules_of
from router.http.openai.params import for_prompt, num_choices, sampling_from, tokens_asked_for
from router.http.openai.prompts import chat_prompt, check_chat, check_completion, completion_prompts
from router.http.openai.schema import ChatRequest, CompletionRequest, parse_body
from router.http.openai.structural_tags import structural_form
from router.http.openai.unsupported import ignored_fields, refuse_unsupported
from router.model import ServedModel, load_served_model
from router.text.calls.formats import CALL_FORMATS
from runtime.config import ModelSection
from runtime.config.tiers import TierSection
from runtime.tiers import Tiers
from tests.fuzz.target import Target

_TEMPLATE = "deepseek-v3.1"
_SPECIAL = ("<bos>", "<eos>", "<think>", "</think>", *CALL_FORMATS[_TEMPLATE].marks)
_HEADER = re.compile(r"[A-Za-z0-9_.$\[\]?-]*")
"""What a header may say of a field."""


def write_tokenizer(folder: Path) -> int:
    """A byte-level tokenizer without merges; how many ids it has."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    return int(backend.get_vocab_size())


@functools.cache
def model() -> ServedModel:
    """One that reasons and calls."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {"vocab_size": write_tokenizer(folder), "max_position_embeddings": 4096}
        (folder / "config.json").write_text(json.dumps(config))
        settings = {"bos_token": "<bos>", "eos_token": "<eos>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return load_served_model(ModelSection(path=name, name="m", chat_template=_TEMPLATE))


@functools.cache
def _tiers() -> Tiers:
    return Tiers((TierSection(name="gold", share=0.5), TierSection(name="open", order=1)))


def _never() -> bool:
    return False


def _check(request: ChatRequest | CompletionRequest, num_bytes: int, num_prompts: int) -> None:
    """What every endpoint of generation does with its request."""
    limits = model().limits
    refuse_unsupported(request)
    standing_of(request, _tiers(), None, max_priority=9)
    sampling = sampling_from(request, limits)
    rules = rules_of(request, model())
    if rules is not None:
        orjson.dumps([form.format for form in rules.forms()])
        rules.left_out()
    tokens_asked_for(request, num_bytes, num_choices(request, num_prompts, 128))
    for_prompt(sampling, 1, limits, param="messages")
    for name in ignored_fields(request, model(), rules.left_out() if rules is not None else ()):
        assert _HEADER.fullmatch(name), name


def _chat(request: ChatRequest, num_bytes: int) -> None:
    check_chat(request, model(), model().limits)
    _check(request, num_bytes, 1)
    prompt = chat_prompt(request, model(), model().limits, _never)
    assert max(prompt.token_ids, default=0) < model().limits.vocab_size
    new_reader(request, model(), prompt)


def _completion(request: CompletionRequest, num_bytes: int) -> None:
    check_completion(request, model(), model().limits)
    _check(request, num_bytes, len(request.prompt))
    prompts = completion_prompts(request, model(), model().limits, _never)
    assert len(prompts) == len(request.prompt)


def _told(run: Callable[[], None], names: Callable[[], Mapping[str, str]]) -> None:
    """Run it; a refusal can be told."""
    refusal: RequestError | None = None
    try:
        with errors_named_by(names):
            run()
    except RequestError as error:
        refusal = error
    if refusal is not None:
        body = failure_from(refusal).body("id")
        assert orjson.loads(orjson.dumps(body)) == body
        assert refusal.status < 500
        assert len(refusal.message) < 10_000, "a refusal repeats what was sent"


def chat(data: bytes) -> None:
    """``/v1/chat/completions``."""
    asked: list[ChatRequest] = []

    def run() -> None:
        asked.append(parse_body(data, ChatRequest))
        if asked[0].tools is not None:
            asked[0].client_names = asked[0].tools.names()
        _chat(asked[0], len(data))

    _told(run, lambda: asked[0].client_names if asked else {})


def completions(data: bytes) -> None:
    """``/v1/completions``."""
    _told(lambda: _completion(parse_body(data, CompletionRequest), len(data)), dict)


def generate(data: bytes) -> None:
    """``/generate``."""
    asked = [GenerateRequest()]

    def run() -> None:
        asked[0] = parse_body(data, GenerateRequest)
        assert asked[0].is_list in (True, False)
        _completion(as_completion(asked[0]), len(data))

    _told(run, lambda: names_of_generate(asked[0]))


def messages(data: bytes) -> None:
    """``/v1/messages`` and what counts their tokens."""
    for kind in (MessagesRequest, CountRequest):
        asked: list[CountRequest] = []

        def run(kind: type[CountRequest] = kind, asked: list[CountRequest] = asked) -> None:
            asked.append(parse_body(data, kind))
            _chat(chat_of_messages(asked[0], model()), len(data))

        def names(asked: list[CountRequest] = asked) -> Mapping[str, str]:
            return names_of_messages(asked[0] if asked else None)

        _told(run, names)


def responses(data: bytes) -> None:
    """``/v1/responses`` and what counts their tokens."""
    for kind in (ResponsesRequest, InputRequest):
        asked: list[InputRequest] = []

        def run(kind: type[InputRequest] = kind, asked: list[InputRequest] = asked) -> None:
            asked.append(parse_body(data, kind))
            _chat(chat_of_responses(asked[0]), len(data))

        def names(asked: list[InputRequest] = asked) -> Mapping[str, str]:
            return names_of_responses(asked[0] if asked else None)

        _told(run, names)


def tokenize(data: bytes) -> None:
    """``/tokenize`` and ``/detokenize``."""

    def run() -> None:
        body = parse_body(data, TokenizeRequest)
        generation = as_generation(body)
        if isinstance(generation, ChatRequest):
            _chat(generation, len(data))
        else:
            _completion(generation, len(data))

    def back() -> None:
        found = text_answer(parse_body(data, DetokenizeRequest), model(), model().limits)
        ids = model().tokenizer.encode(str(found["prompt"]), add_special_tokens=False)
        orjson.dumps(tokens_answer(ids, model(), model().limits, with_strings=True))

    _told(run, dict)
    _told(back, dict)


def structural_tags(data: bytes) -> None:
    """Structural tags, as a field holds them."""

    def run() -> None:
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        if isinstance(value, dict):
            orjson.dumps(structural_form(value, "response_format").format)

    _told(run, dict)


def queries(data: bytes) -> None:
    """What is asked of ``/experts``."""
    pairs = [line.partition("=") for line in data.decode(errors="replace").split("\n")]
    _told(lambda: Asked.of({name: value for name, _, value in pairs}) and None, dict)


def _json(**fields: object) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode()


_USER = {"role": "user", "content": "hi <think>"}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_FUNCTION = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}
_TURNS = [
    {"role": "system", "content": [{"type": "text", "text": "s"}]},
    _USER,
    {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "r"},
    {"role": "tool", "tool_call_id": "c", "content": "3"},
]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$"}}}
_TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [
            {
                "begin": "<f>",
                "content": {"type": "json_schema", "json_schema": _SCHEMA},
                "end": ["</f>"],
            }
        ],
        "at_least_one": True,
    },
}
_WORDS = (
    *("required", "auto", "none", "function", "allowed_tools", "mode", "tools", "tool_choice"),
    *("response_format", "json_schema", "json_object", "structural_tag", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "choice"),
    *("logit_bias", "stop_token_ids", "chat_template_kwargs", "thinking", "reasoning_effort"),
    *("max_reasoning_tokens", "continue_final_message", "prompt_logprobs", "service_tier"),
    *("cache_control", "max_tokens", "stream_options", "n", "seed", "echo", "logprobs"),
)

TARGETS = {
    "http-chat": Target(
        run=chat,
        seeds=(
            _json(
                model="m",
                messages=_TURNS,
                tools=[{"type": "function", "function": _FUNCTION}],
                tool_choice="required",
                temperature=0.5,
                stop=["a"],
                logit_bias={"3": 1},
                max_tokens=3,
            ),
            _json(
                messages=[_USER],
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True},
                },
                stream=True,
                stream_options={"include_usage": True},
                n=2,
                seed=1e300,
                thinking={"type": "enabled"},
            ),
            _json(messages=[_USER], structured_outputs={"structural_tag": json.dumps(_TAGS)}),
            _json(
                messages=[_USER, {"role": "assistant", "content": "so "}],
                continue_final_message=True,
                chat_template_kwargs={"thinking": False},
                service_tier="gold",
            ),
        ),
        words=_WORDS,
        is_json=True,
    ),
    "http-completions": Target(
        run=completions,
        seeds=(
            _json(prompt=[[1, 2], [3]], logprobs=2, echo=True, regex="a+", max_tokens=2, n=2),
            _json(prompt=["a", "b"], structured_outputs={"choice": ["a", "b"]}, best_of=1),
        ),
        words=_WORDS,
        is_json=True,
    ),
    "http-generate": Target(
        run=generate,
        seeds=(
            _json(
                input_ids=[1, 2],
                sampling_params={"max_new_tokens": 2, "json_schema": json.dumps(_SCHEMA), "n": 2},
                return_logprob=True,
                logprob_start_len=0,
                top_logprobs_num=2,
            ),
            _json(text=["a"], sampling_params={"stop": "b", "ebnf": 'root ::= "a"'}, rid="r"),
        ),
        words=_WORDS,
        is_json=True,
    ),
    "http-messages": Target(
        run=messages,
        seeds=(
            _json(
                model="m",
                max_tokens=9,
                system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
                messages=[
                    {"role": "user", "content": "hi"},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "t", "signature": ""},
                            {"type": "text", "text": "a"},
                            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "c", "content": "3"},
                            {"type": "text", "text": "so?"},
                        ],
                    },
                ],
                tools=[{"name": "f", "input_schema": _SCHEMA}, {"type": "bash_20250124"}],
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
                thinking={"type": "enabled", "budget_tokens": 1024},
                stop_sequences=["x"],
            ),
            _json(
                messages=[{"role": "user", "content": "hi"}],
                output_config={"format": {"type": "json_schema", "schema": _SCHEMA}},
            ),
        ),
        words=_WORDS,
        is_json=True,
    ),
    "http-responses": Target(
        run=responses,
        seeds=(
            _json(
                input=[
                    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "3"},
                ],
                instructions="i",
                tools=[{"type": "function", **_FUNCTION}, {"type": "web_search"}],
                tool_choice={
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "f"}],
                },
                include=["message.output_text.logprobs"],
                metadata={"a": "b"},
                reasoning={"effort": "low"},
            ),
            _json(input="hi", text={"format": {"type": "json_schema", "schema": _SCHEMA}}),
        ),
        words=_WORDS,
        is_json=True,
    ),
    "http-tokenize": Target(
        run=tokenize,
        seeds=(
            _json(messages=_TURNS, tools=[{"type": "function", "function": _FUNCTION}]),
            _json(prompt="a", add_special_tokens=False, return_token_strs=True),
            _json(tokens=[1, 2.0, 300]),
        ),
        words=_WORDS,
        is_json=True,
    ),
    "structural-tags": Target(
        run=structural_tags,
        seeds=(
            orjson.dumps(_TAGS),
            orjson.dumps(
                {
                    "structures": [{"begin": "<f>", "schema": _SCHEMA, "end": "</f>"}],
                    "triggers": ["<f"],
                }
            ),
        ),
        words=(
            *("elements", "sequence", "or", "optional", "plus", "star", "repeat", "min", "max"),
            *("any_text", "excludes", "tags_with_separator", "separator", "const_string", "value"),
            *("grammar", "regex", "pattern", "content", "style", "stop_after_first"),
        ),
        is_json=True,
    ),
    "http-queries": Target(
        run=queries,
        seeds=(b"role=prefill\nworker=w\npasses=8\nseconds=1e0\nformat=npz",),
        words=("role", "passes", "seconds", "format", "nan", "inf"),
    ),
}
