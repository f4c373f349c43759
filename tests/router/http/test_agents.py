"""Agents that people use are answered as they ask: all is taken, tools are called, in order."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.http.openai.hints import IGNORED_HEADER
from tests.router.conftest import MODEL, SPECIAL, Cluster, write_model
from tests.router.http.agents import (
    AGENTS,
    CLAUDE_CODE,
    NAME,
    REMINDER,
    RESULT,
    SYSTEM,
    TASK,
    Agent,
)
from tests.router.http.test_tools import MARKS, prompt_of
from tests.router.text import templates

ARGUMENTS = '{"command": "ls"}'
CALL = f'<tool_call>\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n</tool_call>'
Events = list[dict[str, Any]]
pytestmark = pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    # Prompts of agents are long, and the context of this model is not.
    texts = [json.dumps(agent.body) for agent in AGENTS.values()]
    more = [*texts, CALL, SYSTEM, REMINDER, f"<user>{TASK}", f"<user>[{RESULT}]"] * 4
    write_model(folder, template=templates.WITH_SYSTEM, special=[*SPECIAL, *MARKS], more=more)
    return folder


async def asked(
    http: aiohttp.ClientSession, agent: Agent, body: dict[str, Any]
) -> tuple[set[str], Events]:
    """What was ignored, and the events of the answer."""
    async with http.post(agent.path, json=body, headers=agent.headers) as response:
        text = await response.text()
        assert response.status == 200, text
        ignored = response.headers.get(IGNORED_HEADER, "")
    events = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        if data != "[DONE]":
            events.append(json.loads(data))
            assert lines.get("event", events[-1].get("type")) == events[-1].get("type")
    assert text.endswith("data: [DONE]\n\n") is agent.path.startswith("/v1/chat")
    return set(filter(None, ignored.split(", "))), events


class Said:
    """An answer, added up from its events in the way of the API that they are of."""

    def __init__(self, agent: Agent, events: Events) -> None:
        self.text = self.thoughts = self.arguments = self.call_id = self.name = ""
        self.ending: object = None
        add = {"/v1/r": self._add_response, "/v1/m": self._add_message, "/v1/c": self._add_chunk}
        for event in events:
            add[agent.path[:5]](event)

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        for choice in chunk["choices"]:
            assert self.ending is None
            delta = choice["delta"]
            self.text += delta.get("content") or ""
            self.thoughts += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                assert call["index"] == 0
                self.call_id, self.name = call.get("id", self.call_id), self.name or NAME
                self.arguments += call["function"]["arguments"]
            self.ending = choice["finish_reason"]

    def _add_response(self, event: dict[str, Any]) -> None:
        assert self.ending is None
        match event["type"]:
            case "response.output_text.delta":
                self.text += event["delta"]
            case "response.reasoning_text.delta":
                self.thoughts += event["delta"]
            case "response.output_item.done" if event["item"]["type"] == "function_call":
                item = event["item"]
                assert item["arguments"] == self.arguments
                self.call_id, self.name = item["call_id"], item["name"]
            case "response.function_call_arguments.delta":
                self.arguments += event["delta"]
            case "response.completed":
                self.ending = "tool_calls" if self.name else "stop"

    def _add_message(self, event: dict[str, Any]) -> None:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            block = event["content_block"]
            self.call_id, self.name = block["id"], block["name"]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            self.text += delta.get("text", "")
            self.thoughts += delta.get("thinking", "")
            self.arguments += delta.get("partial_json", "")
        elif event["type"] == "message_delta":
            self.ending = {"tool_use": "tool_calls", "end_turn": "stop"}[
                event["delta"]["stop_reason"]
            ]


def check_order(agent: Agent, events: Events) -> None:
    """What clients of the API rely on."""
    kinds = [str(event.get("type")) for event in events]
    if agent.path.startswith("/v1/chat"):
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        if "stream_options" in agent.body:
            assert events[-1]["choices"] == []
            assert events[-1]["usage"]["completion_tokens"] > 0
    elif agent.path.startswith("/v1/responses"):
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-2:] == ["response.output_item.done", "response.completed"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        ends = [kind.rpartition(".")[2] for kind in kinds if "output_item" in kind]
        assert ends == ["added", "done"] * (len(ends) // 2)
    else:
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
        blocks = [event for event in events if "index" in event]
        for index, group in itertools.groupby(blocks, key=lambda event: event["index"]):
            block = [event["type"] for event in group]
            assert (block[0], block[-1]) == ("content_block_start", "content_block_stop"), index
            assert set(block[1:-1]) == {"content_block_delta"}


async def test_a_tool_is_called_and_its_result_answered(
    http: aiohttp.ClientSession, cluster: Cluster, agent: Agent
) -> None:
    offers = "tools" in agent.body
    # Where a client asks for thoughts, the template begins them.
    begin = "" if "thinking" in agent.body else "<think>"
    cluster.answer = f"{begin}\nhm\n</think>\n\n{CALL if offers else RESULT}"
    ignored, events = await asked(http, agent, agent.body)
    assert ignored == agent.ignored
    check_order(agent, events)
    said = Said(agent, events)
    assert (said.thoughts, said.text) == ("hm", "" if offers else RESULT)
    assert (said.name, said.arguments) == ((NAME, ARGUMENTS) if offers else ("", ""))
    assert said.ending == ("tool_calls" if offers else "stop")
    prompt = prompt_of(cluster)
    assert SYSTEM in prompt
    assert TASK in prompt
    assert "apply_patch" not in prompt
    assert "web_search" not in prompt

    arguments = json.loads(ARGUMENTS) if agent is CLAUDE_CODE else said.arguments
    call = {"id": said.call_id, "name": said.name, "arguments": arguments}
    cluster.answer = f"{begin}hm</think>There is one."
    ignored, events = await asked(http, agent, agent.follow_up(agent.body, call))
    assert ignored == agent.ignored
    check_order(agent, events)
    said = Said(agent, events)
    assert (said.thoughts, said.text, said.ending) == ("hm", "There is one.", "stop")
    assert RESULT in prompt_of(cluster)


async def test_the_same_without_a_stream(
    http: aiohttp.ClientSession, cluster: Cluster, agent: Agent
) -> None:
    cluster.answer = f"<think>\nhm\n</think>\n\n{CALL}"
    body = {**agent.body, "stream": False}
    body.pop("stream_options", None)
    async with http.post(agent.path, json=body, headers=agent.headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        assert set(response.headers[IGNORED_HEADER].split(", ")) == agent.ignored
    assert answer["model"] == MODEL
    assert NAME in json.dumps(answer.get("choices") or answer.get("output") or answer["content"])
