"""``/v1/responses`` through the real ``openai`` client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import openai
import pytest

from tests.router.conftest import ANSWER, MODEL, Cluster, StartRouter
from tests.router.http.test_tools import (
    ARGUMENTS,
    CALL,
    CALL_NOW,
    prompt_of,
    write_model_of_tools,
)
from tests.waiting import until

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
NOW = {"type": "function", "name": "now", "parameters": None, "strict": False}
BODY = {"model": MODEL, "input": "say hello"}


async def ask(http: aiohttp.ClientSession, **change: object) -> tuple[int, dict]:
    async with http.post("/v1/responses", json={**BODY, **change}) as response:
        return response.status, await response.json()


async def streamed(client: openai.AsyncOpenAI, **options: object) -> list:
    stream = await client.responses.create(**{**BODY, **options}, stream=True)
    return [event async for event in stream]


@pytest.fixture(scope="module")
def folder_of_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_of_tools(tmp_path_factory.mktemp("tools"))


@pytest.fixture
async def thinking(start_router: StartRouter, folder_of_tools: Path) -> Cluster:
    """A model that reasons and calls."""
    cluster = await start_router(folder_of_tools)
    await cluster.add_pair()
    return cluster


@pytest.fixture
async def thinker(thinking: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{thinking.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_an_answer(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    answer = await client.responses.create(
        **BODY, instructions="be brief", metadata={"a": "b"}, max_output_tokens=200, store=True
    )
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.model) == ("response", "completed", MODEL)
    assert answer.output_text == ANSWER
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert answer.metadata == {"a": "b"}
    assert (answer.instructions, answer.max_output_tokens) == ("be brief", 200)
    assert answer.error is None
    assert answer.incomplete_details is None
    assert answer.store is False  # and nobody claims otherwise
    text = "<bos>be brief<user>say hello<assistant>"
    assert prompt_of(cluster) == text
    num_prompt = len(cluster.prefill.seen[0].context_token_ids)
    usage = answer.usage
    assert usage.input_tokens == num_prompt
    assert usage.input_tokens_details.cached_tokens == num_prompt // 2
    assert usage.output_tokens == cluster.num_answer_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


async def test_events_come_in_order(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    events = await streamed(client)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert len(kinds) > 15
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == ANSWER
    assert all(event.logprobs == [] for event in events[4:-4])
    final = events[-1].response
    item = final.output[0]
    assert events[0].response.id == final.id
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    assert {event.item_id for event in events[3:-2]} == {item.id}
    assert events[-4].text == events[-3].part.text == item.content[0].text == ANSWER
    assert events[-2].item == item
    assert final.usage.output_tokens == cluster.num_answer_tokens


async def test_a_streams_events_have_names(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/responses", json={**BODY, "stream": True}) as response:
        raw = await response.read()
    assert b"[DONE]" not in raw
    for lines in raw.removesuffix(b"\n\n").split(b"\n\n"):
        name, data = lines.split(b"\n")
        assert name.decode() == f"event: {json.loads(data.removeprefix(b'data: '))['type']}"


async def test_the_clients_own_stream_helper(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(**BODY) as stream:
        snapshots = [e.snapshot async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert snapshots[-1] == final.output_text == ANSWER


async def test_an_answer_without_a_text(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    body = {**BODY, "extra_body": {"stop": ANSWER[:5]}}
    answer = await client.responses.create(**body)
    assert (answer.status, answer.output_text, answer.output) == ("completed", "", [])
    async with client.responses.stream(**body) as stream:
        final = await stream.get_final_response()
    assert final.output == []


async def test_a_full_answer_is_incomplete(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    answer = await client.responses.create(**BODY, max_output_tokens=4)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.output_text == cluster.text_of(4)
    events = await streamed(client, max_output_tokens=4)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.usage.output_tokens == 4


async def test_top_logprobs_need_logprobs_to_be_included(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"Fix: send include: .*logprobs") as caught:
        await client.responses.create(**BODY, top_logprobs=2)
    assert caught.value.param == "top_logprobs"


async def test_logprobs_of_a_text(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = await client.responses.create(**BODY, **wanted, max_output_tokens=5)
    (part,) = answer.output[0].content
    assert "".join(entry.token for entry in part.logprobs) == part.text == cluster.text_of(5)
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    events = await streamed(client, **wanted, max_output_tokens=5)
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    tokens = [entry.token for event in deltas for entry in event.logprobs]
    assert tokens == [entry.token for entry in part.logprobs]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [entry.token for entry in done.logprobs] == tokens


async def test_thoughts_and_calls_are_items(thinker: openai.AsyncOpenAI, thinking: Cluster) -> None:
    thinking.answer = f"<think>\nHm, two.\n</think>\n\nI look.\n{CALL}\n{CALL_NOW}"
    options = {"tools": [WEATHER, NOW], "tool_choice": "auto"}
    answer = await thinker.responses.create(**BODY, **options)
    thought, message, first, second = answer.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Hm, two.", [])
    assert message.content[0].text == "I look."
    assert (first.name, first.arguments, second.name) == ("weather", ARGUMENTS, "now")
    assert first.call_id != second.call_id
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert [tool.name for tool in answer.tools] == ["weather", "now"]
    assert answer.tools[0].parameters == WEATHER["parameters"]
    events = await streamed(thinker, **options)
    kinds = [event.type for event in events]
    collapsed = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    added, done = "response.output_item.added", "response.output_item.done"
    part, part_done = "response.content_part.added", "response.content_part.done"

    def text(name: str) -> list[str]:
        return [f"response.{name}.delta", f"response.{name}.done"]

    call = [added, *text("function_call_arguments"), done]
    assert collapsed == [
        *("response.created", "response.in_progress"),
        *(added, part, *text("reasoning_text"), part_done, done),
        *(added, part, *text("output_text"), part_done, done),
        *call,
        *call,
        "response.completed",
    ]
    output = events[-1].response.output
    assert [item.type for item in output] == [item.type for item in answer.output]
    whole = "response.function_call_arguments.done"
    assert [event.arguments for event in events if event.type == whole] == [ARGUMENTS, "{}"]
    async with thinker.responses.stream(**BODY, **options) as stream:
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in answer.output]


async def test_a_named_tool_is_called(thinker: openai.AsyncOpenAI, thinking: Cluster) -> None:
    thinking.answer = f"<think>\nHm.\n</think>\n\n{CALL}{CALL}"
    choice = {"type": "function", "name": "weather"}
    answer = await thinker.responses.create(**BODY, tools=[WEATHER, NOW], tool_choice=choice)
    thought, call = answer.output
    assert thought.type == "reasoning"
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", ARGUMENTS)
    assert answer.tool_choice.name == "weather"
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    events = await streamed(thinker, tools=[WEATHER], **one)
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == ARGUMENTS
    assert events[-1].response.output[1].arguments == ARGUMENTS


async def test_allowed_tools_alone_are_called(
    thinker: openai.AsyncOpenAI, thinking: Cluster
) -> None:
    thinking.answer = f"<think>\nHm.\n</think>\n\n{CALL}"
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}],
    }
    answer = await thinker.responses.create(**BODY, tools=[WEATHER, NOW], tool_choice=choice)
    assert answer.output[1].name == "weather"
    assert answer.tool_choice.mode == "required"
    assert answer.tool_choice.tools == choice["tools"]
    assert thinking.prefill.seen[-1].sampling.constraint.grammar
    with pytest.raises(openai.BadRequestError, match="none of tools"):
        await thinker.responses.create(**BODY, tools=[NOW], tool_choice=choice)
    choice["tools"] = [{"type": "mcp", "server_label": "x"}]
    with pytest.raises(openai.BadRequestError, match="tools\\[0\\], which is none"):
        await thinker.responses.create(**BODY, tools=[NOW], tool_choice=choice)


def of_chat(tool: dict) -> dict:
    """Without what says nothing, which a template would write."""
    return {name: value for name, value in tool.items() if name != "type" and value is not None}


async def test_items_of_an_answer_go_back_as_input(
    thinker: openai.AsyncOpenAI, thinking: Cluster
) -> None:
    """As agents do that keep the conversation themselves; the same prompt as of a chat."""
    thinking.answer = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"
    tools = [WEATHER, NOW]
    answer = await thinker.responses.create(**BODY, tools=tools)
    call = answer.output[-1]
    turn = {"role": "user", "content": [{"type": "input_text", "text": "say hello"}]}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items = [turn, *(item.model_dump() for item in answer.output), result]
    thinking.answer = "It rains."
    answer = await thinker.responses.create(
        model=MODEL, input=items, tools=tools, include=["reasoning.encrypted_content"]
    )
    assert answer.output_text == "It rains."
    seen = prompt_of(thinking)
    function = {"name": "weather", "arguments": ARGUMENTS}
    calls = [{"id": call.call_id, "type": "function", "function": function}]
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    await thinker.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "say hello"},
            {**said, "tool_calls": calls},
            {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
        ],
        tools=[{"type": "function", "function": of_chat(tool)} for tool in tools],
    )
    assert seen == prompt_of(thinking)
    assert "rain" in seen


async def test_a_failure_within_a_stream(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    cluster.decode.fail_after = 3
    with pytest.raises(openai.APIError, match=r".") as raised:
        await streamed(client)
    assert raised.value.code == "out_of_kv_blocks"


async def test_a_failure_within_a_stream_on_the_wire(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    cluster.decode.fail_after = 3
    async with http.post("/v1/responses", json={**BODY, "stream": True}) as response:
        assert response.status == 200
        raw = await response.read()
    *_, error, failed = [
        json.loads(lines.split(b"data: ")[1]) for lines in raw.split(b"\n\n") if b"data: " in lines
    ]
    assert error["type"] == "error"
    assert error["code"] == error["error"]["code"] == "out_of_kv_blocks"
    assert failed["type"] == "response.failed"
    assert failed["sequence_number"] == error["sequence_number"] + 1
    response = failed["response"]
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert response["output"][0]["content"][0]["text"] == cluster.text_of(3)


async def test_a_failure_before_the_first_token_has_a_status(
    client: openai.AsyncOpenAI, cluster: Cluster
) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="other", input="x", stream=True)


async def test_no_response_can_be_asked_for_again(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(**BODY, max_output_tokens=1)
    for ask_for in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="no response is stored here"):
            await ask_for(answer.id)


async def test_a_client_that_leaves_ends_its_request(
    client: openai.AsyncOpenAI, http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    cluster.decode.hold_after = 2
    stream = await client.responses.create(**BODY, stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await until(lambda: len(cluster.decode.aborted) == 1)
    async with http.get("/status") as response:
        assert (await response.json())["num_requests_in_flight"] == 0


TURN = {"role": "user", "content": "x"}
SECRET_THOUGHT = {"type": "reasoning", "encrypted_content": "x"}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"client_metdata": {"a": "b"}}, "client_metdata"),
        ({"input": []}, "input"),
        ({"input": [IMAGE]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": "x"}, {"type": "item_reference"}]},
            "input[1].type",
        ),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        ({"instructions": "x", "input": [IMAGE["content"][0], CALLED]}, "input[0].type"),
        (
            {"instructions": "x", "input": [TURN, CALLED]},
            "input[1].tool_calls",
        ),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": [WEATHER]}, "tools"),
        ({"tools": [{**WEATHER, "defer_lading": True}]}, "tools[0].defer_lading"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"include": ["file_search_call.result"]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"efort": "low"}}, "reasoning.efort"),
        ({"text": {"verbosity": 3}}, "text.verbosity"),
        ({"text": {"format": {"type": "nonsense"}}}, "text.format.type"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"verbosity": "low"}, "verbosity"),
    ],
)
async def test_invalid_values_name_the_field(
    http: aiohttp.ClientSession, cluster: Cluster, change: dict[str, object], param: str
) -> None:
    status, answer = await ask(http, **change)
    assert status == 400
    assert answer["error"]["param"] == param
    assert answer["error"]["message"].startswith(param.split(".")[0].split("[")[0])
    assert cluster.prefill.seen == []
