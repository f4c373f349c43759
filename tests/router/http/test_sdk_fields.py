"""Every field that the clients' own types know is honoured, or refused by its name: none is lost.

The types are those of the installed ``openai`` and ``anthropic``. A field that a newer one adds is
tried with a value of its own making: it has to be refused, or named as ignored.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsBase as ChatCreateParamsBase,
)
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from router.http.unsupported import IGNORED_HEADER
from tests.router.conftest import MODEL, Cluster

TURNS = [{"role": "user", "content": "hi"}]
CHAT_TOOL = {"type": "function", "function": {"name": "f"}}
TOOL = {"type": "function", "name": "f", "parameters": None, "strict": None}
MESSAGES_TOOL = {"name": "f", "input_schema": {"type": "object"}}
HONOURED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": TURNS,
        "model": MODEL,
        "max_tokens": 3,
        "max_completion_tokens": 3,
        "frequency_penalty": 1.0,
        "presence_penalty": 1.0,
        "logit_bias": {"5": 1},
        "logprobs": True,
        "n": 2,
        "seed": 1,
        "stop": ["x"],
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.5,
        # They change no answer.
        **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), "x"),
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_retention": "24h",
        "service_tier": "auto",
        "store": True,
    },
    "/v1/completions": {
        "prompt": "hi",
        "model": MODEL,
        "max_tokens": 3,
        "best_of": 1,
        "echo": True,
        "frequency_penalty": 1.0,
        "presence_penalty": 1.0,
        "logit_bias": {"5": 1},
        "logprobs": 1,
        "n": 2,
        "seed": 1,
        "stop": "x",
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.5,
        "user": "x",
    },
    "/v1/responses": {
        "input": "hi",
        "model": MODEL,
        "max_output_tokens": 3,
        "include": ["message.output_text.logprobs"],
        "instructions": "be brief",
        "metadata": {"a": "b"},
        "stream_options": {"include_obfuscation": False},
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "reasoning": {"summary": "auto"},
        "tool_choice": "auto",
        "top_p": 0.5,
        # They change no answer.
        **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), "x"),
        "max_tool_calls": 3,
        "parallel_tool_calls": True,
        "prompt_cache_retention": "24h",
        "service_tier": "auto",
        "store": True,
        "truncation": "disabled",
    },
    "/v1/responses/input_tokens": {
        "input": "hi",
        "model": MODEL,
        "instructions": "be brief",
        "text": {"format": {"type": "text"}},
        "reasoning": {"summary": "auto"},
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "truncation": "disabled",
    },
    "/v1/messages": {
        "messages": TURNS,
        "model": MODEL,
        "max_tokens": 3,
        "stop_sequences": ["x"],
        "system": "be brief",
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "auto"},
        # They change no answer.
        "cache_control": {"type": "ephemeral"},
        "metadata": {"user_id": "x"},
        "service_tier": "auto",
        "speed": "standard",
    },
    "/v1/messages/count_tokens": {
        "messages": TURNS,
        "model": MODEL,
        "system": "be brief",
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "auto"},
        "cache_control": {"type": "ephemeral"},
        "speed": "standard",
    },
}
REFUSED: dict[str, Any] = {
    "audio": {"voice": "x", "format": "wav"},
    "background": True,
    "container": "x",
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "modalities": ["audio"],
    "moderation": {"model": "x"},
    "n": 1000,
    "output_config": {"effort": "low"},
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "response_format": {"type": "nonsense"},
    "speed": "fast",
    "stream_options": {"include_obfuscation": True},
    "suffix": "x",
    "text": {"verbosity": "low"},
    "top_logprobs": 3,  # without logprobs
    "truncation": "auto",
    "verbosity": "low",
    "web_search_options": {},
}
"""Values that this model or server cannot honour; other fields are tried with a text."""
TYPES: dict[str, Any] = {
    "/v1/chat/completions": ChatCreateParamsBase,
    "/v1/completions": CompletionCreateParamsBase,
    "/v1/responses": ResponseCreateParamsBase,
    "/v1/responses/input_tokens": InputTokenCountParams,
    "/v1/messages": MessageCreateParamsBase,
    "/v1/messages/count_tokens": MessageCountTokensParams,
}
TOOLS = {path: [TOOL] for path in TYPES} | {
    "/v1/chat/completions": [CHAT_TOOL],
    "/v1/messages": [MESSAGES_TOOL],
    "/v1/messages/count_tokens": [MESSAGES_TOOL],
}
NEEDED = ("messages", "model", "max_tokens", "prompt", "input")


async def post(http: aiohttp.ClientSession, path: str, **change: object) -> tuple[int, str, str]:
    """The status, what was said of a failure, and the fields that were ignored."""
    body = {name: value for name, value in HONOURED[path].items() if name in NEEDED}
    if "max_output_tokens" in HONOURED[path]:
        body["max_output_tokens"] = 3
    async with http.post(path, json={**body, **change}) as response:
        answer = await response.json()
        error = answer.get("error") or {}
        told = error.get("param") or error.get("message") or ""
        return response.status, told, response.headers.get(IGNORED_HEADER, "")


@pytest.mark.parametrize("path", TYPES)
async def test_no_field_of_a_clients_types_is_lost(
    http: aiohttp.ClientSession, cluster: Cluster, path: str
) -> None:
    for name in sorted(TYPES[path].__annotations__):
        value = HONOURED[path].get(name)
        if value is not None:
            assert await post(http, path, **{name: value}) == (200, "", ""), name
        if value is None or name in REFUSED:
            value = TOOLS[path] if name == "tools" else REFUSED.get(name, "x")
            status, told, ignored = await post(http, path, **{name: value})
            assert status == 400 or ignored == name, (name, status, ignored)
            assert status != 400 or told.startswith(name), (name, told)


@pytest.mark.parametrize("path", TYPES)
async def test_fields_that_are_known_to_be_refused_are(
    http: aiohttp.ClientSession, cluster: Cluster, path: str
) -> None:
    for name in REFUSED.keys() & TYPES[path].__annotations__.keys():
        status, told, _ = await post(http, path, **{name: REFUSED[name]})
        assert (status, told.startswith(name)) == (400, True), (name, status, told)
    assert cluster.decode.seen == []


async def test_every_path_says_which_methods_it_has(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    """Of a sample of all kinds; those of the tokenizer and of models are added as these are."""
    posts = [*TYPES, "/generate", "/tokenize", "/detokenize"]
    gets = ["/v1/models", f"/v1/models/{MODEL}", "/version", "/server_info", "/health", "/status"]
    for paths, methods in ((posts, "POST"), (gets, "GET, HEAD")):
        for path in paths:
            async with http.delete(path) as response:
                assert (response.status, response.headers["Allow"]) == (405, methods), path
