"""Every field of the clients' own types is honoured, named as ignored, or refused by its name.

The types are those of the installed ``openai`` and ``anthropic``, walked down to the fields of what
they hold. A field that a newer client adds is asked about as well: what is silent about it has to
be told apart from what is honoured here, by hand.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.http.openai.hints import HINTS, HOSTED_TOOLS, IGNORED_HEADER
from tests.router.conftest import MODEL, SPECIAL, Cluster, write_model
from tests.router.http.sdk_types import Walk
from tests.router.http.test_tools import MARKS
from tests.router.text import templates

TURN = {"role": "user", "content": "hi"}
CALL = {"id": "x", "type": "function", "function": {"name": "x", "arguments": "{}"}}
ITEM = {"type": "function_call", "call_id": "x", "name": "x", "arguments": "{}"}
USE = {"type": "tool_use", "id": "x", "name": "x", "input": {}}
SCHEMA = {"type": "object"}
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": (
        "openai.types.chat.completion_create_params.CompletionCreateParamsBase",
        {"messages": [TURN], "max_tokens": 2},
    ),
    "/v1/completions": (
        "openai.types.completion_create_params.CompletionCreateParamsBase",
        {"prompt": "hi", "max_tokens": 2},
    ),
    "/v1/responses": (
        "openai.types.responses.response_create_params.ResponseCreateParamsBase",
        {"input": "hi", "max_output_tokens": 2},
    ),
    "/v1/responses/input_tokens": (
        "openai.types.responses.input_token_count_params.InputTokenCountParams",
        {"input": "hi"},
    ),
    "/v1/messages": (
        "anthropic.types.message_create_params.MessageCreateParamsBase",
        {"messages": [TURN], "max_tokens": 2},
    ),
    "/v1/messages/count_tokens": (
        "anthropic.types.message_count_tokens_params.MessageCountTokensParams",
        {"messages": [TURN]},
    ),
}
"""The type of each path's body, and what no body goes without."""
SAMPLES: dict[str, object] = {
    "model": MODEL,
    "logit_bias": {"5": 1},
    "service_tier": "auto",
    "response_format.json_schema": {"schema": SCHEMA},
    "text.format": {"schema": SCHEMA},
    "output_config.format": {"schema": SCHEMA},
    "ResponseOutputTextParam": {"annotations": []},
    "thinking": {"budget_tokens": None},
    "FunctionCallOutput": {"call_id": "x"},
}
AROUND = {
    "messages": ([TURN, {"role": "assistant", "tool_calls": [CALL]}], []),
    "input": ([TURN, ITEM], []),
}
OF_ANTHROPIC = {"messages": ([TURN, {"role": "assistant", "content": [USE]}], [TURN])}
"""Messages before and behind the one that is asked about: results need their calls."""

SAMPLING = "frequency_penalty logit_bias n presence_penalty seed stop temperature top_p"
ITEMS = "arguments call_id content content.refusal content.text content.type id name output"
ITEMS += " output.text output.type phase role status summary.text summary.type summary type"
TURNS = "content content.text content.type role content.tool_use_id content.content"
TURNS += " content.content.text content.content.type content.is_error content.signature"
TURNS += " content.thinking content.id content.input content.name content.caller"
TURNS += " content.caller.type"
CALLS = "content.text content.type content name refusal content.refusal role tool_call_id"
CALLS += " tool_calls tool_calls.function.arguments tool_calls.function.name tool_calls.function"
CALLS += " tool_calls.id tool_calls.type"
FORMAT = "description name schema strict type"


def within(prefix: str, names: str) -> set[str]:
    return {f"{prefix}.{name}" for name in names.split()}


def under(prefix: str, names: str) -> set[str]:
    return {prefix, *within(prefix, names)}


PROMPT_OF_RESPONSES = {
    *["instructions", "model", "parallel_tool_calls", "tool_choice", "truncation"],
    *under("input", ITEMS),
    *under("text.format", FORMAT),
    *under("tools", "allowed_callers description name parameters strict type"),
    *within("reasoning", "context mode"),  # with the values that are so anyway
}
PROMPT_OF_MESSAGES = {
    *["model", "speed"],
    *under("messages", TURNS),
    *within("output_config", "format format.schema format.type"),
    *under("system", "text type"),
    *under("thinking", "display type"),
    *under("tool_choice", "disable_parallel_tool_use type"),
    *under("tools", "allowed_callers description name strict type input_schema"),
    *under("tools.input_schema", "properties required type"),
}
HONOURED: dict[str, set[str]] = {
    "/v1/chat/completions": {
        *SAMPLING.split(),
        *[
            "function_call",
            "logprobs",
            "max_completion_tokens",
            "max_tokens",
            "modalities",
            "model",
        ],
        *["parallel_tool_calls", "prompt_cache_key", "service_tier", "tool_choice"],
        *["prompt_cache_options.mode"],  # where it is implicit
        *under("messages", CALLS),
        *under("response_format", "type json_schema"),
        *under("response_format.json_schema", "description name schema strict"),
        *within("stream_options", "include_usage"),
        *under("tools", "type function"),
        *under("tools.function", "description name parameters strict"),
    },
    "/v1/completions": {
        *SAMPLING.split(),
        *["best_of", "echo", "logprobs", "max_tokens", "model", "prompt"],
        *within("stream_options", "include_usage"),
    },
    "/v1/responses": {
        *PROMPT_OF_RESPONSES,
        *["max_output_tokens", "max_tool_calls", "metadata", "prompt_cache_key"],
        *["prompt_cache_options.mode"],
        *["safety_identifier", "service_tier", "temperature", "top_p", "user"],
    },
    "/v1/responses/input_tokens": PROMPT_OF_RESPONSES,
    "/v1/messages": {
        *PROMPT_OF_MESSAGES,
        *["max_tokens", "service_tier", "stop_sequences"],
    },
    "/v1/messages/count_tokens": PROMPT_OF_MESSAGES,
}
"""Fields that the server does as it is told with, by one of their values at least."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, template=templates.WITH_SYSTEM, special=[*SPECIAL, *MARKS])
    return folder


class Answers:
    """What one path says to the fields that it is asked about."""

    def __init__(self, http: aiohttp.ClientSession, path: str) -> None:
        self._http = http
        self._path = path
        self.silent: set[str] = set()
        """Taken, and not named."""

    async def ask(self, field: str, body: dict[str, Any]) -> bool:
        """Whether what is below ``field`` has to be asked about, too."""
        async with self._http.post(self._path, json=body) as response:
            answer = await response.json()
            ignored = response.headers.get(IGNORED_HEADER, "").split(", ")
        if response.status != 200:
            assert response.status == 400, (field, body, answer)
            error = answer["error"]
            told = re.sub(r"\[\d+\]", "", error.get("param") or error["message"].split()[0])
            is_named = told.startswith(field) or f"{field}.".startswith(f"{told}.")
            assert is_named, (field, body, error)
            return False
        if any(f"{name}.".startswith(f"{field}.") for name in ignored):
            return False
        if any(name and field.startswith(f"{name}.") for name in ignored):
            return False
        self.silent.add(field)
        return True


@pytest.mark.parametrize("path", TYPES)
async def test_no_field_of_a_clients_types_is_lost(
    http: aiohttp.ClientSession, cluster: Cluster, path: str
) -> None:
    name, needed = TYPES[path]
    module, _, kind = name.rpartition(".")
    around = {**AROUND, **(OF_ANTHROPIC if "messages" in path else {})}

    def among(before: list[Any], behind: list[Any], value: Any) -> Any:
        return [*before, *value, *behind] if isinstance(value, list) else value

    walk = Walk(
        SAMPLES,
        {field: lambda value, at=at: among(*at, value) for field, at in around.items()},
    )
    answers = Answers(http, path)
    request_type = getattr(importlib.import_module(module), kind)
    await walk.fields(request_type, {"model": MODEL, **needed}, answers.ask)
    assert answers.silent == HONOURED[path]


def test_hints_are_the_names_of_fields_that_nobody_reads_here() -> None:
    """A misspelt name is nearly one of these, and is none."""
    for api, hints in HINTS.items():
        for path in hints:
            assert re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", path), (api, path)
    for kinds in HOSTED_TOOLS.values():
        assert "function" not in kinds
        assert list(kinds) == sorted(set(kinds))


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
