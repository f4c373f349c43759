"""Tools and reasoning through the real ``openai`` client, with marks as special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from router.http.openai.conversation import new_reader, template_messages
from router.http.openai.response import Prompt
from router.http.openai.schema import ChatRequest
from router.model import load_served_model
from router.text.call_history import CallHistory
from router.text.reasoning import Start
from runtime.config import ModelSection
from runtime.errors import PeerLostError
from tests.router.conftest import MODEL, SPECIAL, Cluster, StartRouter, write_model
from tests.router.text import templates
from tests.waiting import until

if TYPE_CHECKING:
    import openai

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
USER = {"role": "user", "content": "weather?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = '{"city": "K\u00f6ln"}'
CALL = '<tool_call>\n{"name": "weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def write_model_of_tools(folder: Path, *more: str) -> Path:
    """A model whose template knows these tools; its tokenizer knows ``more`` texts as well."""
    texts = [json.dumps([WEATHER, NOW]), *more] * 2
    write_model(folder, template=templates.HERMES, special=[*SPECIAL, *MARKS], more=texts)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_of_tools(tmp_path_factory.mktemp("tools"))


async def chat(client: openai.AsyncOpenAI, **options):
    return await client.chat.completions.create(**{"model": MODEL, "messages": [USER], **options})


async def streamed(client: openai.AsyncOpenAI, **options) -> list:
    return [chunk async for chunk in await chat(client, stream=True, **options)]


def prompt_of(cluster: Cluster) -> str:
    """The prompt of the latest request."""
    ids = cluster.prefill.seen[-1].context_token_ids
    return b"".join(cluster.tokenizer.vocabulary.pieces[token_id] for token_id in ids).decode()


def test_only_what_may_hold_parts_is_read_for_them(folder: Path, model_dir: Path) -> None:
    """A request without tools, of a model that does not reason, costs nothing more per token."""
    plain = load_served_model(ModelSection(path=str(model_dir)))
    reasoning = load_served_model(ModelSection(path=str(folder)))
    body = {"model": MODEL, "messages": [USER]}
    tools = {**body, "tools": [NOW]}
    for model, fields, start, is_read in (
        (plain, body, Start.CLOSED, False),
        (reasoning, body, Start.CLOSED, False),
        (reasoning, {**tools, "tool_choice": "none"}, Start.CLOSED, False),
        (reasoning, body, Start.UNDECIDED, True),
        (reasoning, tools, Start.CLOSED, True),
    ):
        prompt = Prompt(token_ids=[1], start=start)
        reader = new_reader(ChatRequest.model_validate(fields), model, prompt)
        assert (reader is not None) is is_read


async def test_a_call(client, cluster: Cluster) -> None:
    cluster.answer = "I look.\n" + CALL
    answer = await chat(client, tools=[WEATHER, NOW])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    assert prompt_of(cluster).startswith("<bos>" + json.dumps(WEATHER))
    assert answer.usage.completion_tokens == cluster.num_answer_tokens


async def test_several_calls_and_no_content(client, cluster: Cluster) -> None:
    cluster.answer = CALL + "\n" + CALL_NOW
    for _ in range(2):
        message = (await chat(client, tools=[WEATHER, NOW], tool_choice="auto")).choices[0].message
        assert message.content is None
        assert [call.function.name for call in message.tool_calls] == ["weather", "now"]
        assert len({call.id for call in message.tool_calls}) == 2


async def test_a_streamed_call(client, cluster: Cluster) -> None:
    cluster.answer = CALL + "\n" + CALL_NOW
    chunks = await streamed(client, tools=[WEATHER, NOW])
    choices = [chunk.choices[0] for chunk in chunks]
    news = [call for choice in choices for call in choice.delta.tool_calls or ()]
    firsts = [call for call in news if call.id is not None]
    assert [(call.index, call.type, call.function.name) for call in firsts] == [
        (0, "function", "weather"),
        (1, "function", "now"),
    ]
    others = [call.model_dump(exclude_unset=True) for call in news if call.id is None]
    assert all(set(call) == {"index", "function"} for call in others)
    assert all(set(call["function"]) == {"arguments"} for call in others)
    arguments = ["", ""]
    for call in news:
        arguments[call.index] += call.function.arguments
    assert arguments == [ARGUMENTS, "{}"]
    assert len(news) > 5
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    assert choices[-1].delta.model_dump(exclude_unset=True) == {}
    assert not any(choice.delta.content for choice in choices)


async def test_the_clients_own_stream_helper_adds_a_call_up(client, cluster: Cluster) -> None:
    cluster.answer = "Well.\n" + CALL
    async with client.chat.completions.stream(
        model=MODEL, messages=[USER], tools=[WEATHER]
    ) as stream:
        completion = await stream.get_final_completion()
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)


async def test_a_conversation_goes_on_with_its_calls(client, cluster: Cluster) -> None:
    cluster.answer = "<think>hm</think>I look." + CALL
    first = (await chat(client, tools=[WEATHER])).choices[0].message
    cluster.answer = "Rain."
    messages = [
        USER,
        first.model_dump(),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"},
    ]
    second = await chat(client, messages=messages, tools=[WEATHER])
    assert second.choices[0].message.content == "Rain."
    assert second.choices[0].message.tool_calls is None
    assert prompt_of(cluster).endswith(
        f"<assistant><think>hm</think>I look.{CALL}<eos><user>[rain]<assistant>"
    )


def test_where_a_template_writes_one_of_both_it_gets_the_calls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    message = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    body = ChatRequest.model_validate({"messages": [USER, message]})
    for takes_both, content in ((True, "I look."), (False, None)):
        history = CallHistory(
            wants_objects=False,
            no_content=None,
            takes_both=takes_both,
            reads_results=True,
            call_format=None,
        )
        assert template_messages(body, history) == [USER, {**message, "content": content}]


async def test_no_client_spells_a_control_token_in_tools_or_calls(client, cluster: Cluster) -> None:
    name = "a<eos>b"
    function = {"name": "f", "parameters": {"properties": {name: {"description": "<user>"}}}}
    call = {"name": "f", "arguments": json.dumps({name: "<assistant>"})}
    messages = [
        USER,
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "<tool_call>"},
    ]
    tools = [{"type": "function", "function": function}]
    await chat(client, messages=messages, tools=tools)
    ids = list(cluster.prefill.seen[-1].context_token_ids)
    text = [cluster.tokenizer.vocabulary.token_text(i) for i in ids if i < len(SPECIAL + MARKS)]
    assert text == [
        *("<bos>", "<user>", "<assistant>", "<tool_call>", "</tool_call>"),
        *("<eos>", "<user>", "<assistant>"),
    ]


async def test_tools_that_are_not_to_be_called(client, cluster: Cluster) -> None:
    cluster.answer = "Plain."
    answer = await chat(client, tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content == "Plain."
    assert "weather" not in prompt_of(cluster).replace("weather?", "")


async def test_one_call_where_only_one_may_be(client, cluster: Cluster) -> None:
    cluster.answer = CALL + "\n" + CALL + CALL
    cluster.decode.step_s = 0.01
    answer = await chat(client, tools=[WEATHER], parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.usage.completion_tokens < cluster.num_answer_tokens / 2
    await until(lambda: len(cluster.decode.aborted) == 1)


async def test_a_named_tool_is_called(client, cluster: Cluster) -> None:
    """By a grammar, once, behind the reasoning; the prompt is that of any other request."""
    cluster.answer = CALL + CALL
    named = {"type": "function", "function": {"name": "weather"}}
    for thinks in ({}, {"thinking": True}):
        cluster.answer = "hm</think>" * bool(thinks) + CALL + CALL
        answer = await chat(
            client,
            tools=[WEATHER, NOW],
            tool_choice=named,
            extra_body={"chat_template_kwargs": thinks},
        )
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
        assert answer.choices[0].message.content is None
        assert answer.choices[0].finish_reason == "tool_calls"
        assert prompt_of(cluster).endswith("<assistant>" + "<think>" * bool(thinks))
        constraint = cluster.prefill.seen[-1].sampling.constraint
        assert constraint.grammar
        end = [cluster.tokenizer.token_id("</think>")] if thinks else []
        assert list(constraint.starts_after) == end


async def test_a_call_ends_thoughts_that_nothing_else_ends(client, cluster: Cluster) -> None:
    cluster.answer = "hm\n" + CALL
    thinks = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}
    answer = await chat(client, tools=[WEATHER], stop="hm", **thinks)
    (choice,) = answer.choices
    assert (choice.message.reasoning, choice.message.content) == ("hm", None)
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    assert choice.finish_reason == "tool_calls"
    thoughts = len(cluster.tokenizer.encode("hm\n", add_special_tokens=False))
    assert answer.usage.completion_tokens_details.reasoning_tokens == thoughts
    deltas = [c.choices[0].delta for c in await streamed(client, tools=[WEATHER], **thinks)]
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == "hm"
    news = [call for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(call.function.arguments for call in news) == ARGUMENTS
    # A form that has to hold does so behind the mark, which the workers see to.
    answer = await chat(client, tools=[WEATHER], tool_choice="required", **thinks)
    assert answer.choices[0].message.tool_calls is None
    # The end within the thoughts, and no tools: all of it is thoughts.
    answer = await chat(client, **thinks)
    assert answer.choices[0].message.reasoning == "hm\n" + CALL
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "stop")


async def test_no_more_calls_than_there_may_be(client, cluster: Cluster) -> None:
    import openai

    cluster.answer = "\n".join([CALL] * 4)
    for options, number in (
        ({}, 4),
        ({"extra_body": {"max_tool_calls": 2}}, 2),
        ({"tool_choice": "required"}, 1),
        ({"tool_choice": "required", "parallel_tool_calls": True}, 4),
        ({"tool_choice": "required", "extra_body": {"max_tool_calls": 3}}, 3),
        ({"parallel_tool_calls": False, "extra_body": {"max_tool_calls": 3}}, 1),
    ):
        choice = (await chat(client, tools=[WEATHER], **options)).choices[0]
        assert len(choice.message.tool_calls) == number, options
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    for options in ({"tool_choice": "required"}, {"max_tool_calls": 1}):
        answer = await client.responses.create(
            model=MODEL, input="hi", tools=[{"type": "function", **WEATHER["function"]}], **options
        )
        assert [item.type for item in answer.output] == ["function_call"]
    with pytest.raises(openai.BadRequestError, match="max_tool_calls = 0 is out of range"):
        await chat(client, tools=[WEATHER], extra_body={"max_tool_calls": 0})


async def test_a_call_that_is_cut_off(client, cluster: Cluster) -> None:
    cluster.answer = CALL
    for limit in range(2, cluster.num_answer_tokens - 1, 5):
        answer = await chat(client, tools=[WEATHER], max_tokens=limit)
        (choice,) = answer.choices
        assert choice.finish_reason == "length"
        if choice.message.tool_calls:
            assert ARGUMENTS.startswith(choice.message.tool_calls[0].function.arguments)
        else:
            assert choice.message.content == ""


@pytest.mark.parametrize("text", ['<tool_call>{"name": "nobody"}</tool_call>', "<tool_call>{oh"])
async def test_what_is_no_call_is_text(client, cluster: Cluster, text: str) -> None:
    cluster.answer = text
    choice = (await chat(client, tools=[WEATHER])).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text, "stop")
    chunks = await streamed(client, tools=[WEATHER])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


async def test_reasoning_under_both_names(client, cluster: Cluster) -> None:
    cluster.answer = "<think>\nlet me see\n</think>\n\nIt is 4."
    answer = await chat(client, n=2)
    for choice in answer.choices:
        assert choice.message.reasoning_content == choice.message.reasoning == "let me see"
        assert choice.message.content == "It is 4."
        assert choice.finish_reason == "stop"
    end = cluster.answer.index("</think>") + len("</think>")
    ids = cluster.tokenizer.encode(cluster.answer[:end], add_special_tokens=False)
    details = answer.usage.completion_tokens_details
    assert details.reasoning_tokens == 2 * len(ids)
    assert answer.usage.completion_tokens == 2 * cluster.num_answer_tokens
    stream_options = {"include_usage": True}
    chunks = await streamed(client, stream_options=stream_options)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(getattr(delta, name, "") for delta in deltas) == "let me see"
    assert "".join(delta.content or "" for delta in deltas) == "It is 4."
    assert not any(delta.content and hasattr(delta, "reasoning") for delta in deltas)
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == len(ids)


async def test_an_answer_without_reasoning_says_so(client, cluster: Cluster) -> None:
    answer = await chat(client)
    assert answer.choices[0].message.reasoning_content is None
    assert answer.choices[0].message.content == cluster.answer
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


async def test_the_template_opens_and_closes_the_reasoning(client, cluster: Cluster) -> None:
    cluster.answer = "hm\n</think>\n4"
    for switch, reasoning, content in ((True, "hm", "4"), (False, None, cluster.answer)):
        options = {"chat_template_kwargs": {"thinking": switch}}
        answer = await chat(client, extra_body=options)
        message = answer.choices[0].message
        assert message.reasoning_content == reasoning
        assert message.content == content.replace("</think>", "")
        assert prompt_of(cluster).endswith("<think>" if switch else "</think>")


async def test_reasoning_that_nobody_wants_apart(client, cluster: Cluster) -> None:
    cluster.answer = "<think>hm</think>4"
    hidden = await chat(client, extra_body={"include_reasoning": False}, logprobs=True)
    message = hidden.choices[0].message
    assert message.content == "4"
    assert not hasattr(message, "reasoning_content")
    assert len(hidden.choices[0].logprobs.content) == hidden.usage.completion_tokens
    assert hidden.usage.completion_tokens_details.reasoning_tokens > 2
    for options in ({}, {"skip_special_tokens": False}):
        raw = await chat(client, extra_body={"separate_reasoning": False, **options})
        assert not hasattr(raw.choices[0].message, "reasoning_content")
        shown = raw.choices[0].message.content
        assert shown == (cluster.answer if options else "hm4")


async def test_details_of_tokens_are_whole(client, cluster: Cluster) -> None:
    cluster.answer = "<think>hm</think>So.\n" + CALL
    options = {"logprobs": True, "tools": [WEATHER], "extra_body": {"return_token_ids": True}}
    answer = await chat(client, **options)
    (choice,) = answer.choices
    joined = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert joined.decode() == cluster.answer + "<eos>"
    assert choice.token_ids == cluster.script([])[: cluster.num_answer_tokens]
    assert choice.message.reasoning == "hm"
    assert choice.message.content == "So."
    choices = [chunk.choices[0] for chunk in await streamed(client, **options)]
    entries = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
    assert b"".join(bytes(entry.bytes) for entry in entries) == joined
    token_ids = [i for c in choices for i in getattr(c, "token_ids", ())]
    assert token_ids == choice.token_ids


async def test_stop_strings_count_behind_the_reasoning(client, cluster: Cluster) -> None:
    """In calls, too; and in all that is written where the client wants it as one text."""
    cluster.answer = "<think>hm STOP</think>So. STOP" + CALL
    for options in ({}, {"tools": [WEATHER]}, {"n": 3}):
        answer = await chat(client, stop="STOP", **options)
        for choice in answer.choices:
            assert (choice.message.reasoning, choice.message.content) == ("hm STOP", "So. ")
            assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
        chunks = await streamed(client, stop="STOP", **options)
        said = [(chunk.choices[0].index, chunk.choices[0].delta) for chunk in chunks]
        for number in range(options.get("n", 1)):
            deltas = [delta for index, delta in said if index == number]
            assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == "hm STOP"
            assert "".join(delta.content or "" for delta in deltas) == "So. "
    whole = await chat(client, stop="STOP", extra_body={"separate_reasoning": False})
    assert whole.choices[0].message.content == "hm "
    cluster.answer = "<think>hm</think>So. " + CALL
    answer = await chat(client, tools=[WEATHER], stop=["ln"])
    assert answer.choices[0].finish_reason == "stop"
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.arguments == ARGUMENTS[: ARGUMENTS.index("ln")]


@pytest.mark.parametrize("num_tokens", [1, 3, 8, 20])
async def test_a_message_goes_on_at_another_worker(
    client, cluster: Cluster, num_tokens: int
) -> None:
    cluster.answer = "<think>\nhm, let me see\n</think>\n\nSo.\n" + CALL

    async def said() -> tuple[object, ...]:
        answer = await chat(client, tools=[WEATHER])
        (choice,) = answer.choices
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
        message = choice.message
        return message.reasoning, message.content, calls, choice.finish_reason, answer.usage

    expected = await said()
    assert expected[:4] == ("hm, let me see", "So.", [("weather", ARGUMENTS)], "tool_calls")
    other = await cluster.add_decode("decode-1")
    await until(lambda: other.num_streams > 0)
    for decode in cluster.decodes:
        decode.fail_error, decode.fail_after = PeerLostError("gone"), num_tokens
    seen = sum(len(decode.seen) for decode in cluster.decodes)
    assert await said() == expected
    assert sum(len(decode.seen) for decode in cluster.decodes) == seen + 2


async def test_other_apis_read_the_same_model(http, cluster: Cluster) -> None:
    """Text alone of what it writes; the tokens of what it reads; what it can."""
    cluster.answer = "<think>\nlet me see\n</think>\n\nIt is 4."
    messages = [{"role": "user", "content": "say hello"}]
    body = {"messages": messages, "max_tokens": 100}
    async with http.post("/v1/messages", json=body) as response:
        answer = await response.json()
    assert answer["content"] == [{"type": "text", "text": "It is 4."}]
    assert answer["usage"]["output_tokens"] == cluster.num_answer_tokens
    async with http.post("/v1/messages", json={**body, "stream": True}) as response:
        raw = await response.text()
    assert "let me see" not in raw
    assert raw.count("event: message_stop") == 1
    offered = {"messages": messages, "tools": [WEATHER]}
    async with http.post("/tokenize", json=offered) as response:
        tokens = (await response.json())["tokens"]
    async with http.post("/v1/chat/completions", json={**offered, "max_tokens": 1}) as response:
        assert response.status == 200
    assert tokens == list(cluster.prefill.seen[-1].context_token_ids)
    async with http.get("/v1/models") as response:
        (card,) = (await response.json())["data"]
    assert {"tools", "reasoning"} <= set(card["features"])
    assert (card["tool_parser"], card["reasoning_parser"]) == ("hermes", "think")


BAD_TOOLS = [
    ([{"type": "nonsense"}], "tools[0].type"),
    ([WEATHER, {"type": "function"}], "tools[1].function"),
    ([{"type": "function", "function": {"name": 3}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "two words"}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "f", "parameters": []}}],
     "tools[0].function.parameters"),
    ([WEATHER, WEATHER], "tools[1].function.name"),
    ({"a": 1}, "tools"),
    (["f"], "tools[0]"),
]  # fmt: skip
BAD_MESSAGES = [
    ({"role": "tool", "content": "4"}, "tool_call_id"),
    ({"role": "tool", "content": "4", "tool_call_id": "unknown"}, "tool_call_id"),
    ({"role": "assistant", "tool_calls": "f"}, "tool_calls"),
    ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls[0].type"),
    ({"role": "assistant", "tool_calls": [{"type": "function"}]}, "tool_calls[0].id"),
    ({"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {}}]},
     "tool_calls[0].function.name"),
    ({"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]},
     "tool_calls[0].function.arguments"),
    ({"role": "user", "content": "x", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}]},
     "tool_calls"),
    ({"role": "assistant", "content": "x", "reasoning": 3}, "reasoning"),
]  # fmt: skip


async def refusal(http: aiohttp.ClientSession, **fields: object) -> dict:
    body = {"model": MODEL, "messages": [USER], **fields}
    async with http.post("/v1/chat/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 400, (fields, answer)
        return answer["error"]


async def test_what_is_wrong_is_named_by_its_path(http, cluster: Cluster) -> None:
    for tools, path in BAD_TOOLS:
        for choice in ("auto", "none"):
            assert (await refusal(http, tools=tools, tool_choice=choice))["param"] == path
    for message, path in BAD_MESSAGES:
        error = await refusal(http, messages=[USER, message])
        assert error["param"] == f"messages[1].{path}", error
    choice = {"type": "function", "function": {"name": "then"}}
    error = await refusal(http, tools=[NOW, WEATHER], tool_choice=choice)
    assert (error["param"], error["code"]) == ("tool_choice", "unsupported_value")
    assert cluster.decode.seen == []


async def test_without_parsers_tools_are_refused(start_router: StartRouter, folder: Path) -> None:
    cluster = await start_router(folder, tool_parser="none", reasoning_parser="none")
    await cluster.add_prefill()
    await cluster.add_decode()
    async with aiohttp.ClientSession(cluster.url) as http:
        await until(lambda: cluster.decode.num_streams > 0)
        error = await refusal(http, tools=[WEATHER])
        assert error["param"] == "tools"
        assert "router.tool_parser" in error["message"]
        assert (await refusal(http, separate_reasoning=True))["param"] == "separate_reasoning"
        cluster.answer = "<think>a</think>b"
        body = {"model": MODEL, "messages": [USER]}
        async with http.post("/v1/chat/completions", json=body) as response:
            message = (await response.json())["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "ab", "refusal": None}


async def test_arguments_for_a_template_that_wants_objects(
    start_router: StartRouter, tmp_path: Path
) -> None:
    write_model(tmp_path, template=templates.GLM, special=[*SPECIAL, *MARKS])
    cluster = await start_router(tmp_path)
    await cluster.add_prefill()
    await cluster.add_decode()
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": [1]}'}}
    async with aiohttp.ClientSession(cluster.url) as http:
        await until(lambda: cluster.decode.num_streams > 0)
        messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]
        body = {"model": MODEL, "messages": messages}
        async with http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200
        written = "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>"
        assert f"<assistant>{written}<eos>" in prompt_of(cluster)
        call["function"]["arguments"] = "[1"
        error = await refusal(http, messages=messages)
        assert error["param"] == "messages[1].tool_calls[0].function.arguments"


BUNDLED = Path(__file__).resolve().parents[3] / "deploy" / "models" / "tandem-python"


@pytest.fixture
async def deepseek(start_router: StartRouter, tmp_path: Path) -> Cluster:
    """The bundled vocabulary, which has DeepSeek's marks, under a template that writes them."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((BUNDLED / name).read_bytes())
    source = templates.DEEPSEEK_V31
    for ours, theirs in (("<user>", "User"), ("<assistant>", "Assistant")):
        source = source.replace(ours, f"<\uff5c{theirs}\uff5c>")
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    cluster = await start_router(tmp_path)
    await cluster.add_pair()
    return cluster


async def test_deepseeks_marks_are_single_tokens_of_its_vocabulary(deepseek: Cluster) -> None:
    import openai

    begin, end = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
    calls = f"{begin}weather<\uff5ctool\u2581sep\uff5c>{ARGUMENTS}{end}"
    region = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
    deepseek.answer = f"hm</think>So.{region[0]}{calls}{region[1]}"
    options = {"tools": [WEATHER], "extra_body": {"chat_template_kwargs": {"thinking": True}}}
    async with openai.AsyncOpenAI(base_url=f"{deepseek.url}/v1", api_key="none") as client:
        (choice,) = (await chat(client, **options)).choices
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.reasoning, choice.message.content) == ("hm", "So.")
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
        deepseek.answer = "I would write tool_call, not a mark."
        assert (await chat(client, tools=[WEATHER])).choices[0].message.content == deepseek.answer
