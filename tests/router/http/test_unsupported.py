"""What would be lost in silence is refused by name; what nobody knows is named in a header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.errors import RequestError
from router.http.openai.conversation import template_messages
from router.http.openai.output_forms import form_of
from router.http.openai.schema import ChatRequest
from router.http.openai.unsupported import (
    MAX_UNKNOWN,
    ignored_fields,
    refuse_switches,
    template_variables,
    unknown_fields,
)
from router.model import load_served_model
from runtime.config import ModelSection
from tests.router.conftest import MODEL, Cluster, write_model
from tests.router.text import templates

USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [USER]}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

REFUSED_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL]}, "tools"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages[1].tool_calls"),
    ({"messages": [USER, {"role": "function", "name": "f", "content": "4"}]}, "messages[1].role"),
    ({"max_reasoning_tokens": 10}, "max_reasoning_tokens"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}, TOOL, TOOL]}, "tools[2].function.name"),
    ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
    ({"separate_reasoning": True}, "separate_reasoning"),
    ({"include_reasoning": False}, "include_reasoning"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.schema",
    ),
    ({"max_token": 3}, "max_token"),
    ({"temprature": 0}, "temprature"),
]
REFUSED_COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"regex": ""}, "regex"),
    ({"structural_tag": {}}, "structural_tag"),
    ({"max_reasoning_tokens": 1}, "max_reasoning_tokens"),
    ({"grammar": "x"}, "grammar"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"bad_words": ["a"]}, "bad_words"),
    ({"max_new_tokens": 3}, "max_new_tokens"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({f"field_{number}": 1 for number in range(MAX_UNKNOWN + 1)}, None),
]
CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("chat/completions", {**CHAT, **fields}, param) for fields, param in REFUSED_CHATS
]
CASES += [("completions", {**COMPLETION, **fields}, param) for fields, param in REFUSED_COMPLETIONS]


async def test_what_would_be_lost_in_silence_is_refused_by_name(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    for path, body, param in CASES:
        async with http.post(f"/v1/{path}", json=body) as response:
            answer = await response.json()
        assert response.status == 400, (body, answer)
        assert answer["error"]["param"] == param, answer
        assert "Fix: " in answer["error"]["message"], answer
    assert cluster.decode.seen == []


async def test_a_misspelt_field_is_told_its_name(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    for wrong, right in (("max_token", "max_tokens"), ("max_new_tokens", "max_tokens")):
        async with http.post("/v1/completions", json={**COMPLETION, wrong: 3}) as response:
            error = (await response.json())["error"]
        assert error["code"] == "unknown_field"
        assert f"did you mean {right}?" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_ignored_is_named_in_a_header(
    http: aiohttp.ClientSession, cluster: Cluster, stream: bool
) -> None:
    body = {**CHAT, "max_tokens": 2, "stream": stream, "store": False, "bad_words": []}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        assert "x-tandem-ignored-fields" not in response.headers
    body |= {"watermark": True, "odd\nname\u00e9": 1}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        assert response.headers["x-tandem-ignored-fields"] == "watermark, odd?name?"
        await response.read()


def test_switches_that_the_template_reads_reach_it() -> None:
    body = ChatRequest.model_validate(
        {**CHAT, "reasoning_effort": "low", "chat_template_kwargs": {"thinking": True, "x": 1}}
    )
    read = frozenset({"reasoning_effort", "thinking"})
    assert template_variables(body, read) == {"reasoning_effort": "low", "thinking": True, "x": 1}
    for kind, is_on in (("enabled", True), ("disabled", False)):
        body = ChatRequest.model_validate({**CHAT, "thinking": {"type": kind}})
        assert template_variables(body, frozenset({"enable_thinking"})) == {
            "enable_thinking": is_on
        }
        assert template_variables(body, read) == {"thinking": is_on}


@pytest.mark.parametrize("template", [templates.HERMES, templates.QUIET])
def test_reasoning_that_cannot_be_turned_off_is_not_said_to_be(
    tmp_path: Path, template: str
) -> None:
    write_model(tmp_path, template=template)
    model = load_served_model(ModelSection(path=str(tmp_path)))
    for fields, is_off, path in (
        ({"thinking": False}, True, "thinking"),
        ({"thinking": {"type": "disabled"}}, True, "thinking"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True, "chat_template_kwargs."),
        ({"enable_thinking": True}, False, "enable_thinking"),
        ({"reasoning_effort": "none"}, False, "reasoning_effort"),
    ):
        body = ChatRequest.model_validate({**CHAT, **fields})
        reads = template is templates.HERMES and "thinking" in fields
        if is_off and not reads and template is templates.HERMES:
            with pytest.raises(RequestError, match=f"{path}.* no such switch"):
                refuse_switches(body, model)
            continue
        refuse_switches(body, model)
        ignored = ignored_fields(body, model)
        assert ignored == [] if reads else [name.startswith(path) for name in ignored] == [True]


def test_an_unknown_field_is_refused_or_read_or_of_no_meaning_and_never_two_of_these() -> None:
    names = [name for kind in unknown_fields().values() for name in kind]
    assert len(names) == len(set(names))


def nested(begin: str, inner: str, end: str, depth: int = 500) -> str:
    return begin * depth + inner + end * depth


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("guided_json", nested('{"type":"array","items":', "true", "}")),
        (
            "structural_tag",
            nested('{"type":"optional","content":', '{"type":"any_text"}', "}"),
        ),
    ],
)
def test_json_within_a_text_is_as_deep_as_a_body_may_be(field: str, text: str) -> None:
    given: dict[str, Any] = {field: text}
    if field == "structural_tag":
        given = {"structured_outputs": {field: f'{{"format":{text}}}'}}
    with pytest.raises(RequestError, match="nested too deep") as caught:
        form_of(ChatRequest.model_validate({"messages": [USER], **given}))
    assert (caught.value.param or "").endswith(field)


def test_arguments_of_earlier_calls_are_as_deep_as_a_body_may_be(tmp_path: Path) -> None:
    write_model(tmp_path, template=templates.GLM)
    history = load_served_model(ModelSection(path=str(tmp_path))).call_history
    assert history is not None
    assert history.wants_objects
    function = {"name": "f", "arguments": nested('{"a":', "1", "}")}
    said = {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}
    chat = ChatRequest.model_validate({"messages": [USER, said]})
    with pytest.raises(RequestError, match="nested too deep") as caught:
        template_messages(chat, history)
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
