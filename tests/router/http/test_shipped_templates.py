"""Tools of checkpoints whose own templates read none, and ids of calls that are the model's own."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.text.calls.deepseek import DEEPSEEK_MARKS
from router.text.calls.kimi import KIMI_MARKS
from router.text.template_choice import shipped_template
from tests.router.conftest import MODEL, SPECIAL, Cluster, StartRouter, write_model

TURNS = ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"]
KIMI = (
    "{% for m in messages %}<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "<|im_assistant|>assistant<|im_middle|>"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
USER = {"role": "user", "content": "weather?"}
ARGUMENTS = '{"city": "K\u00f6ln"}'
IDS = ["functions.weather:0", "functions.weather:1"]


def written(ids: list[str]) -> str:
    marks = KIMI_MARKS
    calls = [f"{marks.call_begin}{i}{marks.separator}{ARGUMENTS}{marks.call_end}" for i in ids]
    return f"{marks.calls_begin}{''.join(calls)}{marks.calls_end}"


@pytest.fixture
async def kimi(start_router: StartRouter, tmp_path: Path) -> Cluster:
    """A checkpoint with Kimi's marks, whose own template knows no tools."""
    special = [*SPECIAL, *TURNS, *KIMI_MARKS]
    write_model(tmp_path, template=KIMI, special=special, more=[json.dumps(TOOL)] * 2)
    cluster = await start_router(tmp_path)
    await cluster.add_pair()
    cluster.answer = "I look." + written(IDS)
    return cluster


async def post(cluster: Cluster, path: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, **fields}
    async with (
        aiohttp.ClientSession(cluster.url) as http,
        http.post(path, json=body) as response,
    ):
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
    return answer


def prompt_of(cluster: Cluster) -> str:
    ids = cluster.prefill.seen[-1].context_token_ids
    return b"".join(cluster.tokenizer.vocabulary.pieces[token_id] for token_id in ids).decode()


async def test_a_call_goes_round_under_the_id_that_the_model_wrote(kimi: Cluster) -> None:
    offered = {"messages": [USER], "tools": [TOOL]}
    (choice,) = (await post(kimi, "/v1/chat/completions", **offered))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "I look."
    assert [call["id"] for call in message["tool_calls"]] == IDS
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"] * 2
    assert prompt_of(kimi).startswith("<|im_system|>tool_declare<|im_middle|>[{")
    kimi.answer = "Rain."
    results = [{"role": "tool", "tool_call_id": i, "content": "rain"} for i in IDS]
    # Without tools: what was called and came back is written all the same.
    for more in ({}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}):
        messages = [USER, message, *results]
        await post(kimi, "/v1/chat/completions", messages=messages, **more)
        returned = "".join(
            f"<|im_system|>tool<|im_middle|>## Return of {i}\nrain<|im_end|>" for i in IDS
        )
        end = f"I look.{written(IDS)}<|im_end|>{returned}<|im_assistant|>assistant<|im_middle|>"
        assert prompt_of(kimi).endswith(end)
    await post(kimi, "/v1/chat/completions", messages=[USER])
    own = "<|im_user|>user<|im_middle|>weather?<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert prompt_of(kimi) == own


async def test_a_streamed_call_has_that_id(kimi: Cluster) -> None:
    body = {"model": MODEL, "messages": [USER], "tools": [TOOL], "stream": True}
    async with (
        aiohttp.ClientSession(kimi.url) as http,
        http.post("/v1/chat/completions", json=body) as response,
    ):
        lines = (await response.text()).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    calls = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", ())]
    assert [call["id"] for call in calls if "id" in call] == IDS


async def test_responses_and_messages_have_that_id(kimi: Cluster) -> None:
    tool = {"type": "function", **FUNCTION}
    answer = await post(kimi, "/v1/responses", input="weather?", tools=[tool])
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    assert [call["call_id"] for call in calls] == IDS
    tool = {"name": "weather", "input_schema": PARAMETERS}
    options = {"messages": [USER], "tools": [tool], "max_tokens": 200}
    answer = await post(kimi, "/v1/messages", **options)
    uses = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert [use["id"] for use in uses] == IDS
    assert uses[0]["input"] == json.loads(ARGUMENTS)


async def test_deepseeks_own_template_gives_way_where_tools_come(
    start_router: StartRouter, tmp_path: Path
) -> None:
    user, assistant = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
    own = f"{{% for m in messages %}}{user}{{{{ m.content }}}}{{% endfor %}}{assistant}"
    special = [*SPECIAL, user, assistant, *DEEPSEEK_MARKS]
    prompt = shipped_template("deepseek-v3").render([USER], tools=[TOOL])
    write_model(tmp_path, template=own, special=special, more=[prompt] * 2)
    cluster = await start_router(tmp_path)
    await cluster.add_pair()
    marks = DEEPSEEK_MARKS
    head = f"{marks.calls_begin}{marks.call_begin}function{marks.separator}weather\n```json\n"
    cluster.answer = f"{head}{ARGUMENTS}\n```{marks.call_end}{marks.calls_end}"
    answer = await post(cluster, "/v1/chat/completions", messages=[USER], tools=[TOOL])
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", ARGUMENTS)
    assert "## Tools" in prompt_of(cluster)
    await post(cluster, "/v1/chat/completions", messages=[USER])
    assert prompt_of(cluster) == f"{user}weather?{assistant}"


async def test_the_router_says_once_what_stands_in(
    start_router: StartRouter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, template=KIMI, special=[*SPECIAL, *TURNS, *KIMI_MARKS])
    with caplog.at_level(logging.INFO):
        await start_router(tmp_path)
    lines = [r.getMessage() for r in caplog.records if "chat_template" in r.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith(f"model={MODEL} the checkpoint has a chat template without tools")
    assert 'model.chat_template = "kimi-k2"' in lines[0]


async def test_without_a_template_for_tools_the_field_is_named(cluster: Cluster) -> None:
    body = {"model": MODEL, "messages": [USER], "tools": [TOOL]}
    async with (
        aiohttp.ClientSession(cluster.url) as http,
        http.post("/v1/chat/completions", json=body) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "tools")
    assert "set model.chat_template to a file" in error["message"]
    assert "deepseek-v3.1" in error["message"]
