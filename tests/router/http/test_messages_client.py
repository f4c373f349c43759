"""Tools, thinking and counting over ``/v1/messages``, through the real ``anthropic`` client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import openai
import pytest

from router.http.apis.messages.answer import arguments_of
from tests.router.conftest import MODEL, Cluster, StartRouter, write_model
from tests.router.http.test_tools import (
    ARGUMENTS,
    CALL,
    CALL_NOW,
    MARKS,
    SPECIAL,
    prompt_of,
    write_model_of_tools,
)
from tests.router.http.test_tools import NOW as CHAT_NOW
from tests.router.http.test_tools import WEATHER as CHAT_WEATHER
from tests.router.text import templates
from tests.waiting import until

TURN = {"role": "user", "content": "weather?"}
BODY = {"model": MODEL, "max_tokens": 100, "messages": [TURN]}
WEATHER = {
    "name": "weather",
    "description": "of a city",
    "input_schema": CHAT_WEATHER["function"]["parameters"],
}
NOW = {"name": "now", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
TOOLS = [WEATHER, NOW]
THINKING = {"type": "enabled", "budget_tokens": 1024}
ANSWER = f"\nHm, two.\n</think>\n\nI look.\n{CALL}\n{CALL_NOW}"
"""Behind a prompt that opens the thoughts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_of_tools(tmp_path_factory.mktemp("tools"))


@pytest.fixture
async def cluster(start_router: StartRouter, folder: Path) -> Cluster:
    cluster = await start_router(folder)
    await cluster.add_pair()
    cluster.answer = ANSWER
    return cluster


@pytest.fixture
async def claude(cluster: Cluster) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=cluster.url, api_key="none", max_retries=0
    ) as client:
        yield client


async def test_an_answer_with_thoughts_and_calls(
    claude: anthropic.AsyncAnthropic, cluster: Cluster
) -> None:
    answer = await claude.messages.create(**BODY, tools=TOOLS, thinking=THINKING)
    thought, text, first, second = answer.content
    assert (thought.type, thought.thinking) == ("thinking", "Hm, two.")
    assert (text.type, text.text) == ("text", "I look.")
    assert (first.type, first.name, first.input) == ("tool_use", "weather", json.loads(ARGUMENTS))
    assert (second.name, second.input) == ("now", {})
    assert first.id != second.id
    assert answer.stop_reason == "tool_use"
    assert answer.usage.output_tokens == cluster.num_answer_tokens
    assert 0 < answer.usage.output_tokens_details.thinking_tokens < answer.usage.output_tokens


async def test_a_stream_of_blocks(claude: anthropic.AsyncAnthropic) -> None:
    stream = await claude.messages.create(**BODY, tools=TOOLS, thinking=THINKING, stream=True)
    events = [event async for event in stream]
    assert (events[0].type, events[0].message.content) == ("message_start", [])
    assert [e.type for e in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2].delta.stop_reason == "tool_use"
    kinds = []
    open_block = None
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert open_block is None
            open_block = event.index
            assert open_block == len(kinds)
            kinds.append((event.content_block.type, set()))
        elif event.type == "content_block_delta":
            assert event.index == open_block
            kinds[-1][1].add(event.delta.type)
        else:
            assert (event.type, event.index) == ("content_block_stop", open_block)
            open_block = None
    assert kinds == [
        ("thinking", {"thinking_delta"}),
        ("text", {"text_delta"}),
        ("tool_use", {"input_json_delta"}),
        ("tool_use", {"input_json_delta"}),
    ]


async def test_the_clients_own_stream_helper_gives_the_whole_answer(
    claude: anthropic.AsyncAnthropic,
) -> None:
    options = {**BODY, "tools": TOOLS, "thinking": THINKING}
    answer = await claude.messages.create(**options)
    async with claude.messages.stream(**options) as stream:
        final = await stream.get_final_message()

    def said(message: anthropic.types.Message) -> list[dict]:
        return [block.model_dump(exclude={"id"}) for block in message.content]

    assert said(final) == said(answer)
    assert final.usage.output_tokens == answer.usage.output_tokens


async def test_blocks_of_an_answer_go_back_as_a_turn(
    claude: anthropic.AsyncAnthropic, cluster: Cluster
) -> None:
    """The same prompt as of the chat that says so."""
    cluster.answer = f"\nHm, two.\n</think>\n\nI look.\n{CALL}"
    answer = await claude.messages.create(**BODY, tools=TOOLS, thinking=THINKING)
    call = answer.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain", "is_error": True}
    said = {"role": "assistant", "content": [block.model_dump() for block in answer.content]}
    thanks = {"type": "text", "text": "and?"}
    turns = [TURN, said, {"role": "user", "content": [result, thanks]}]
    cluster.answer = "It rains."
    answer = await claude.messages.create(**{**BODY, "messages": turns}, tools=TOOLS)
    assert (answer.content[0].text, answer.stop_reason) == ("It rains.", "end_turn")
    seen = prompt_of(cluster)
    arguments = json.dumps(json.loads(ARGUMENTS), separators=(",", ":"), ensure_ascii=False)
    function = {"name": "weather", "arguments": arguments}
    call = {"id": call.id, "type": "function", "function": function}
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm, two."}
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=[
                TURN,
                {**said, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": "Error: rain"},
                {"role": "user", "content": "and?"},
            ],
            tools=[
                CHAT_WEATHER,
                {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
            ],
        )
    assert prompt_of(cluster) == seen
    assert "Error: rain" in seen


async def test_tool_choices(claude: anthropic.AsyncAnthropic, cluster: Cluster) -> None:
    cluster.answer = CALL
    for tools, choice in (
        (TOOLS, {"type": "tool", "name": "weather"}),
        (TOOLS, {"type": "any"}),
    ):
        answer = await claude.messages.create(**BODY, tools=tools, tool_choice=choice)
        (call,) = answer.content
        assert (call.name, call.input) == ("weather", json.loads(ARGUMENTS))
    cluster.answer = f"I look.\n{CALL}\n{CALL_NOW}"
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    answer = await claude.messages.create(**BODY, tools=TOOLS, tool_choice=alone)
    assert [block.type for block in answer.content] == ["text", "tool_use"]
    answer = await claude.messages.create(**BODY, tools=TOOLS, tool_choice={"type": "none"})
    assert {block.type for block in answer.content} == {"text"}
    assert "weather" not in prompt_of(cluster).split("weather?")[0]


async def test_thinking_is_shown_where_it_is_asked_for(
    claude: anthropic.AsyncAnthropic, cluster: Cluster
) -> None:
    thoughts = "\nHm, two.\n</think>\n\nIt is 4."
    for thinking, answer, kinds in (
        (None, "<think>" + thoughts, ["text"]),
        ({"type": "disabled"}, "It is 4.", ["text"]),
        ({**THINKING, "display": "omitted"}, thoughts, ["text"]),
        ({"type": "adaptive"}, thoughts, ["thinking", "text"]),
    ):
        cluster.answer = answer
        options = {} if thinking is None else {"thinking": thinking}
        message = await claude.messages.create(**BODY, **options)
        assert [block.type for block in message.content] == kinds
        assert message.content[-1].text == "It is 4."
        thought = message.usage.output_tokens_details.thinking_tokens
        assert (thought > 0) is (thoughts in answer)
    raw = await claude.messages.with_raw_response.create(**BODY, thinking=THINKING)
    assert raw.headers["x-tandem-ignored-fields"] == "thinking.budget_tokens"


async def test_thinking_is_switched_where_the_template_has_a_switch(
    start_router: StartRouter, tmp_path: Path
) -> None:
    write_model(tmp_path, template=templates.DEEPSEEK_V31, special=[*SPECIAL, *MARKS])
    cluster = await start_router(tmp_path)
    await cluster.add_pair()
    async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key="none") as client:
        for thinking, ending in ((THINKING, "<think>"), ({"type": "disabled"}, "</think>")):
            await client.messages.create(**BODY, thinking=thinking)
            assert prompt_of(cluster).endswith(ending)


async def test_a_count_is_that_of_the_prompt(
    claude: anthropic.AsyncAnthropic, cluster: Cluster
) -> None:
    options = {"model": MODEL, "messages": [TURN], "tools": TOOLS}
    count = await claude.messages.count_tokens(**options)
    answer = await claude.messages.create(**options, max_tokens=5)
    usage = answer.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError) as raised:
        await claude.messages.count_tokens(model=MODEL, messages=[])
    assert raised.value.body["error"]["message"].startswith("messages")
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.count_tokens(model="other", messages=[TURN])
    assert len(cluster.prefill.seen) == 1
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        tools = [{"type": "function", **CHAT_NOW["function"], "parameters": None, "strict": None}]
        options = {"model": MODEL, "input": "hi", "tools": tools}
        count = await client.responses.input_tokens.count(**options)
        answer = await client.responses.create(**options, max_output_tokens=1)
        assert count.input_tokens == answer.usage.input_tokens


async def test_failures_are_its_own_errors(
    claude: anthropic.AsyncAnthropic, cluster: Cluster
) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(**{**BODY, "model": "other"})
    cluster.decode.fail_after = 3
    stream = await claude.messages.create(**BODY, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        async for _ in stream:
            pass


async def test_a_client_that_leaves_ends_its_request(
    claude: anthropic.AsyncAnthropic, cluster: Cluster
) -> None:
    cluster.decode.hold_after = 2
    stream = await claude.messages.create(**BODY, stream=True)
    await stream.close()
    await until(lambda: len(cluster.decode.aborted) == 1)


def test_arguments_that_are_cut_off_or_no_object() -> None:
    assert arguments_of('{"a": [1, 2') == {"a": [1, 2]}
    assert arguments_of("") == {}
    assert arguments_of("3") == {"invalid_arguments": "3"}
    assert arguments_of("{]") == {"invalid_arguments": "{]"}
