"""What an answer has to look like: every spelling becomes a grammar, or is refused by its place."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from runtime.pb import common_pb2
from tests.router.conftest import MODEL, Cluster, StartRouter
from tests.router.http.test_tools import CALL_NOW, NOW, WEATHER, prompt_of, write_model_of_tools
from tests.waiting import until

if TYPE_CHECKING:
    import openai

USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 4}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}

TAGGED = {
    "type": "sequence",
    "elements": [
        {"type": "const_string", "value": "Go:"},
        {
            "type": "tags_with_separator",
            "tags": [
                {
                    "begin": "<a>",
                    "content": {"type": "json_schema", "json_schema": SCHEMA},
                    "end": ["</a>", "</b>"],
                },
                {"begin": "<c>", "content": {"type": "any_text", "excludes": ["!"]}, "end": "</c>"},
            ],
            "separator": ",",
            "at_least_one": True,
        },
        {"type": "optional", "content": {"type": "regex", "pattern": "x+"}},
        {
            "type": "repeat",
            "min": 1,
            "max": 2,
            "content": {
                "type": "or",
                "elements": [
                    {"type": "grammar", "grammar": 'root ::= "yz"'},
                    {"type": "star", "content": {"type": "const_string", "value": "w"}},
                ],
            },
        },
    ],
}
"""A structural tag of most kinds of parts."""


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


def structural(fmt: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": fmt}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_of_tools(tmp_path_factory.mktemp("structured"), CALL_NOW)


def constraint_of(cluster: Cluster) -> common_pb2.OutputConstraint:
    """Of the latest request; both workers have the same."""
    constraint = cluster.prefill.seen[-1].sampling.constraint
    assert cluster.decode.seen[-1].sampling.constraint == constraint
    return constraint


def literals(grammar: str) -> str:
    """The texts of a grammar as it travels."""
    found = json.loads(grammar)
    data, starts = found["grammar_expr_data"], found["grammar_expr_indptr"]
    texts = []
    for start in starts[:-1] if starts[-1] == len(data) else starts:
        if data[start] == 0:
            texts.append(bytes(b % 256 for b in data[start + 2 : start + 2 + data[start + 1]]))
    return b"".join(texts).decode(errors="replace")


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        answer["headers"] = response.headers
        return answer


async def test_every_spelling_is_a_grammar(http, cluster: Cluster) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"response_format": json_schema(SCHEMA, strict=True)}, "days"),
        ({"response_format": {"type": "json_object"}}, "{"),
        ({"structured_outputs": {"json": SCHEMA}}, "days"),
        ({"structured_outputs": {"json": None, "regex": "ab[cd]+"}}, "ab"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
        ({"structured_outputs": {"grammar": 'root ::= "xyz"'}}, "xyz"),
        ({"structured_outputs": {"json_object": True}}, "{"),
        ({"response_format": {"type": "structural_tag", "format": TAGGED}}, "days"),
        (
            {
                "structured_outputs": {
                    "structural_tag": json.dumps({"type": "structural_tag", "format": TAGGED})
                }
            },
            "days",
        ),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "triggers": ["<f="],
                    "structures": [{"begin": "<f=1>", "schema": SCHEMA, "end": "</f>"}],
                }
            },
            "days",
        ),
        ({"guided_json": json.dumps(SCHEMA)}, "days"),
        ({"guided_regex": "ab[cd]+"}, "ab"),
        ({"guided_choice": ["yes", "no"]}, "yes"),
        ({"guided_grammar": 'root ::= "xyz"'}, "xyz"),
        ({"json_schema": json.dumps(SCHEMA)}, "days"),
        ({"regex": "ab[cd]+"}, "ab"),
        ({"ebnf": 'root ::= "xyz"'}, "xyz"),
    ]
    for fields, text in forms:
        await post(http, "/v1/completions", {**COMPLETION, **fields})
        constraint = constraint_of(cluster)
        assert text in literals(constraint.grammar), fields
        assert not constraint.starts_after
    for fields, text in forms[:3]:
        answer = await post(http, "/v1/chat/completions", {**CHAT, **fields})
        assert text in literals(constraint_of(cluster).grammar)
        assert "x-tandem-ignored-fields" not in answer["headers"]
    for name, value in (
        ("json_schema", json.dumps(SCHEMA)),
        ("regex", "ab"),
        ("ebnf", 'root ::= "a"'),
    ):
        params = {"max_new_tokens": 3, name: value}
        await post(http, "/generate", {"text": "hi", "sampling_params": params})
        assert constraint_of(cluster).grammar
    await post(http, "/v1/chat/completions", {**CHAT, "response_format": {"type": "text"}})
    assert not cluster.prefill.seen[-1].sampling.HasField("constraint")


async def test_where_the_form_holds(http, cluster: Cluster) -> None:
    """Alone, behind an open reasoning, or with one that the model may begin."""
    closing = cluster.tokenizer.token_id("</think>")
    body = {**CHAT, "response_format": {"type": "json_object"}}
    thinking = {"chat_template_kwargs": {"thinking": True}}
    await post(http, "/v1/chat/completions", {**body, **thinking, "max_reasoning_tokens": 7})
    constraint = constraint_of(cluster)
    assert list(constraint.starts_after) == [closing]
    assert constraint.max_tokens_before == 7
    assert constraint.grammar
    apart = {**body, **thinking, "separate_reasoning": False}
    await post(http, "/v1/chat/completions", apart)
    assert list(constraint_of(cluster).starts_after) == [closing]
    await post(http, "/v1/chat/completions", body)
    whole = constraint_of(cluster)
    assert not whole.starts_after
    assert whole.grammar != constraint.grammar
    await post(http, "/v1/chat/completions", {**CHAT, **thinking, "thinking_token_budget": 5})
    constraint = constraint_of(cluster)
    assert (constraint.grammar, constraint.max_tokens_before) == ("", 5)
    await post(http, "/v1/chat/completions", {**CHAT, "max_reasoning_tokens": 5})
    constraint = constraint_of(cluster)
    assert constraint.grammar
    assert not constraint.max_tokens_before


async def test_who_has_to_call(http, cluster: Cluster) -> None:
    cluster.answer = CALL_NOW + "\n" + CALL_NOW
    body = {"model": MODEL, "messages": [USER], "tools": [NOW, WEATHER]}
    many = {**body, "tool_choice": "required", "parallel_tool_calls": True}
    answer = await post(http, "/v1/chat/completions", many)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 2
    several = constraint_of(cluster).grammar
    assert "weather" in literals(several)
    assert "now" in literals(several)
    one = {**body, "tool_choice": "required"}
    answer = await post(http, "/v1/chat/completions", one)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert constraint_of(cluster).grammar != several
    choice = {"type": "function", "function": {"name": "weather"}}
    await post(http, "/v1/chat/completions", {**body, "tool_choice": choice})
    assert '"now"' not in literals(constraint_of(cluster).grammar)
    # A document, or a call.
    either = {**body, "response_format": json_schema(SCHEMA, strict=True)}
    await post(http, "/v1/chat/completions", either)
    texts = literals(constraint_of(cluster).grammar)
    assert "days" in texts
    assert "weather" in texts


def allowing(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_the_model_calls_allowed_tools_alone_and_is_told_of_all(
    client: openai.AsyncOpenAI, cluster: Cluster, mode: str
) -> None:
    cluster.answer = CALL_NOW
    answer = await client.chat.completions.create(
        model=MODEL, messages=[USER], tools=[NOW, WEATHER], tool_choice=allowing(mode, "now")
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "now"
    texts = literals(constraint_of(cluster).grammar)
    assert "now" in texts
    assert "weather" not in texts
    assert "weather" in prompt_of(cluster), "the prompt is that of any other request"


async def test_a_structural_tag_by_the_clients_own_library(
    client: openai.AsyncOpenAI, cluster: Cluster
) -> None:
    cluster.answer = "Go:<c>d</c>"
    answer = await client.chat.completions.create(
        model=MODEL, messages=[USER], response_format=structural(TAGGED)
    )
    assert answer.choices[0].message.content == "Go:<c>d</c>"
    texts = literals(constraint_of(cluster).grammar)
    assert "Go:" in texts
    assert "yz" in texts


async def test_strict_tools_are_bound_where_they_are_called(http, cluster: Cluster) -> None:
    cluster.answer = "Plain."
    function = {**WEATHER["function"], "strict": True}
    tools = [NOW, {"type": "function", "function": function}]
    answer = await post(http, "/v1/chat/completions", {**CHAT, "tools": tools})
    assert "x-tandem-ignored-fields" not in answer["headers"]
    assert "city" in literals(constraint_of(cluster).grammar)
    await post(http, "/v1/chat/completions", {**CHAT, "tools": [NOW, WEATHER]})
    assert not cluster.prefill.seen[-1].sampling.HasField("constraint")


async def test_without_strict_what_cannot_be_followed_is_told(http, cluster: Cluster) -> None:
    price = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)\d*$"}]}
    schema = {"type": "object", "properties": {"price": price, "no": {"maxLength": 1048576}}}
    body = {**CHAT, "response_format": json_schema(schema)}
    answer = await post(http, "/v1/chat/completions", body)
    places = [".properties.price.anyOf[1].pattern", ".properties.no.maxLength"]
    expected = ", ".join(f"response_format.json_schema.schema{place}" for place in places)
    assert answer["headers"]["x-tandem-ignored-fields"] == expected
    cluster.answer = CALL_NOW
    tool = {"type": "function", "function": {"name": "now", "parameters": schema}}
    body = {**CHAT, "max_tokens": 99, "tools": [tool], "tool_choice": "required"}
    answer = await post(http, "/v1/chat/completions", body)
    expected = ", ".join(f"tools[0].function.parameters{place}" for place in places)
    assert answer["headers"]["x-tandem-ignored-fields"] == expected


async def test_calls_that_write_keys_one_by_one_tell_the_same(
    start_router: StartRouter, folder: Path
) -> None:
    cluster = await start_router(folder, tool_parser="glm-4.5")
    await cluster.add_pair()
    city = {"type": "string", "pattern": "^(?!x)"}
    schema = {"type": "object", "properties": {"city": city}, "minProperties": 1}
    function: dict[str, Any] = {"name": "now", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    async with aiohttp.ClientSession(cluster.url) as http:
        body = {**CHAT, "tools": tools, "tool_choice": "required"}
        answer = await post(http, "/v1/chat/completions", body)
        places = [".properties.city.pattern", ".minProperties"]
        expected = ", ".join(f"tools[0].function.parameters{place}" for place in places)
        assert answer["headers"]["x-tandem-ignored-fields"] == expected
        city["pattern"], function["strict"] = "^x", True
        async with http.post("/v1/chat/completions", json=body) as response:
            error = (await response.json())["error"]
        assert error["param"] == "tools[0].function.parameters.minProperties"
        # A tool that is not strict takes any arguments beside one that is.
        del schema["minProperties"]
        tools.append(WEATHER)
        await post(http, "/v1/chat/completions", {**CHAT, "tools": tools})
    assert literals(constraint_of(cluster).grammar).count("</arg_value>") > 1


async def test_documents_of_schemas_have_white_space_where_it_is_asked_for(
    http, cluster: Cluster
) -> None:
    async def grammar_of(**fields: Any) -> str:
        await post(http, "/v1/completions", {**COMPLETION, **fields})
        return str(constraint_of(cluster).grammar)

    compact = await grammar_of(guided_json=SCHEMA)
    assert compact == await grammar_of(structured_outputs={"json": SCHEMA})
    free = {"json": SCHEMA, "disable_any_whitespace": False}
    assert len(await grammar_of(structured_outputs=free)) > len(compact)
    strict = {"json": SCHEMA, "disable_any_whitespace": True}
    assert compact == await grammar_of(structured_outputs=strict)


DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"properties": {"a": DEEP}}
FORMAT = "response_format.json_schema"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, FORMAT, "missing"),
    ({"response_format": json_schema(None)}, f"{FORMAT}.schema", "missing"),
    ({"response_format": json_schema({}, strict="yes")}, f"{FORMAT}.strict", "true or false"),
    ({"response_format": json_schema({"properties": {"a": {"type": "foo"}}})},
     f"{FORMAT}.schema.properties.a.type", "'foo'"),
    ({"response_format": json_schema({"properties": {"a": {"not": {}}}}, strict=True)},
     f"{FORMAT}.schema.properties.a.not", "not followed"),
    ({"response_format": json_schema({"items": {"type": "integer", "minimum": 3, "maximum": 1}})},
     f"{FORMAT}.schema.items.minimum", "maximum"),
    ({"response_format": json_schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1})},
     f"{FORMAT}.schema", "without end"),
    ({"response_format": json_schema({"$ref": "https://x/y"}, strict=True)},
     f"{FORMAT}.schema.$ref", "within"),
    ({"response_format": json_schema({"pattern": "(a|" * 200 + ")" * 200}, strict=True)},
     f"{FORMAT}.schema.pattern", "levels"),
    ({"response_format": json_schema(DEEP)}, f"{FORMAT}.schema" + ".properties.a" * 4, "too deep"),
    ({"response_format": json_schema({"enum": ["x" * 10**6]})}, f"{FORMAT}.schema", "262144"),
    ({"guided_json": "{"}, "guided_json", "no JSON"),
    ({"guided_json": {"type": "x"}}, "guided_json.type", "'x'"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "Lookahead"),
    ({"guided_choice": []}, "guided_choice", "1000"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "strings"),
    ({"ebnf": "root ::= x"}, "ebnf", "not defined"),
    ({"ebnf": "root ::= root"}, "ebnf", "without end"),
    ({"structured_outputs": {}}, "structured_outputs", "says nothing"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format", "neither"),
    ({"response_format": structural({"type": "tagg"})}, "response_format.format.type", "'tagg'"),
    ({"response_format": structural({"type": "sequence", "elements": [
        {"type": "const_string", "value": "a"}, {"type": "regex", "pattern": 1}]})},
     "response_format.format.elements[1].pattern", "a string"),
    ({"response_format": structural({"type": "or", "elements": [
        {"type": "const_string", "value": "a"},
        {"type": "json_schema", "json_schema": {"properties": {"a": {"type": "foo"}}}}]})},
     "response_format.format.elements[1].json_schema.properties.a.type", "'foo'"),
    ({"response_format": structural({"type": "json_schema", "json_schema": {}, "any_order": True})},
     "response_format.format.any_order", "leave it out"),
    ({"response_format": structural({"type": "repeat", "min": 2, "max": 1.5, "content": {}})},
     "response_format.format.max", "integer"),
    ({"response_format": {"type": "structural_tag", "triggers": [], "structures": [
        {"begin": "<", "schema": {}, "end": ">"}]}}, "response_format.triggers", "strings"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern",
     "not supported"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice",
     "so does structured_outputs.regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex",
     "so does response_format"),
]  # fmt: skip
REFUSED_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"anyOf": [False]}}}],
      "tool_choice": "required"}, "tools[0].function.parameters", "no object"),
    ({"tools": [NOW], "tool_choice": "required", "regex": "a"}, "tool_choice", "regex"),
    ({"tools": [NOW], "tool_choice": allowing("auto", "weather")}, "tool_choice", "none of tools"),
    ({"tools": [NOW], "tool_choice": allowing("any", "now")}, "tool_choice", '"required"'),
    ({"tools": [NOW], "tool_choice": allowing("auto")}, "tool_choice", "at least one"),
    ({"tool_choice": allowing("auto", "now")}, "tool_choice", "none of tools"),
    ({"max_reasoning_tokens": 0}, "max_reasoning_tokens", "out of range"),
    ({"max_reasoning_tokens": 1, "thinking_token_budget": 1}, "thinking_token_budget", "same"),
    ({"tools": [{"type": "function", "function": {
        "name": "f", "strict": True, "parameters": {"properties": {"a": {"if": {}}}}}}]},
     "tools[0].function.parameters.properties.a.if", "not followed"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
      "tool_choice": "required"}, "tools[0].function.parameters.type", "send object"),
]  # fmt: skip


async def test_what_cannot_be_is_refused_before_any_work(http, cluster: Cluster) -> None:
    cases = [("/v1/completions", {**COMPLETION, **f}, p, w) for f, p, w in REFUSED]
    cases += [("/v1/chat/completions", {**CHAT, **f}, p, w) for f, p, w in REFUSED_CHATS]
    for path, body, param, why in cases:
        async with http.post(path, json=body) as response:
            answer = await response.json()
            assert response.status == 400, (body, answer)
        error = answer["error"]
        assert error["param"] == param, error
        assert why in error["message"], error
        assert "Fix: " in error["message"], error
    assert cluster.decode.seen == []


async def test_generate_names_its_own_fields(http, cluster: Cluster) -> None:
    for params, place in (
        ({"json_schema": '{"type": "x"}'}, "sampling_params.json_schema.type"),
        ({"regex": "a", "ebnf": "b"}, "sampling_params.ebnf"),
    ):
        body = {"text": "hi", "sampling_params": params}
        async with http.post("/generate", json=body) as response:
            answer = await response.json()
            assert (response.status, answer["error"]["param"]) == (400, place), answer


async def test_others_are_served_while_a_grammar_is_made(http, cluster: Cluster) -> None:
    """By order: they have their answers before the one that waits for its grammar."""
    schema = {"properties": {f"n{n}": {"enum": [f"{n}{m}" for m in range(20)]} for n in range(60)}}
    body = {**COMPLETION, "guided_json": schema}
    slow = asyncio.create_task(post(http, "/v1/completions", body))
    await until(lambda: cluster.service is not None and not slow.done())
    for _ in range(3):
        await post(http, "/v1/completions", COMPLETION)
    assert not slow.done()
    await slow


def test_a_router_without_grammars_imports_neither_xgrammar_nor_torch() -> None:
    code = "import sys, router.service; print({'xgrammar', 'torch'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
