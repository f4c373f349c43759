"""What clients send to any server is taken and told; what they refused once is what they said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.http.openai.hints import IGNORED_HEADER, Api, take_hints
from tests.router.conftest import MODEL, SPECIAL, Cluster, StartRouter, write_model
from tests.router.http.test_tools import MARKS, NOW, WEATHER, prompt_of
from tests.router.text import templates

TURN = {"role": "user", "content": "hi"}
FLAT = {"type": "function", **WEATHER["function"]}
OF_CLAUDE = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
MARK = {"cache_control": {"type": "ephemeral"}}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [TURN], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [TURN], "max_tokens": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, template=templates.WITH_SYSTEM, special=[*SPECIAL, *MARKS])
    return folder


async def ignored_by(http: aiohttp.ClientSession, path: str, fields: dict[str, Any]) -> list[str]:
    async with http.post(path, json={"model": MODEL, **PATHS[path], **fields}) as response:
        assert response.status == 200, await response.text()
        return [name for name in response.headers.get(IGNORED_HEADER, "").split(", ") if name]


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "low"}, ["reasoning_effort"]),
        ("/v1/chat/completions", {"user": "me", "store": False}, ["user"]),
        ("/v1/completions", {"reasoning_effort": "low", "user": "x"}, ["user", "reasoning_effort"]),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **MARK}]}]},
            ["messages.content.cache_control"],
        ),
        ("/v1/chat/completions", {"tools": [{"type": "web_search"}]}, ["tools.web_search"]),
        ("/v1/responses", {"client_metadata": {"a": "b"}}, ["client_metadata"]),
        (
            "/v1/responses",
            {"reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"}},
            ["reasoning.summary", "reasoning.effort", "text.verbosity"],
        ),
        (
            "/v1/responses",
            {"tools": [{"type": "image_generation"}, FLAT, {"type": "web_search_2025_08_26"}]},
            ["tools.image_generation", "tools.web_search_2025_08_26"],
        ),
        (
            "/v1/responses",
            {"include": ["reasoning.encrypted_content"], "store": True},
            ["store", "include.reasoning.encrypted_content"],
        ),
        ("/v1/responses", {"service_tier": "priority"}, ["service_tier"]),
        (
            "/v1/messages",
            {"metadata": {"user_id": "x"}, "system": [{"type": "text", "text": "x", **MARK}]},
            ["metadata", "system.cache_control"],
        ),
        ("/v1/messages", {"output_config": {"effort": "high"}}, ["output_config.effort"]),
        (
            "/v1/messages",
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}, OF_CLAUDE]},
            ["tools.web_search_20250305"],
        ),
    ],
)
async def test_a_hint_changes_nothing_and_is_told(
    http: aiohttp.ClientSession,
    cluster: Cluster,
    *,
    path: str,
    fields: dict[str, Any],
    ignored: list[str],
) -> None:
    plain = {"tools": [FLAT]} if FLAT in fields.get("tools", ()) else {}
    plain = {"tools": [OF_CLAUDE]} if OF_CLAUDE in fields.get("tools", ()) else plain
    plain |= {"system": "x"} if "system" in fields else {}
    assert await ignored_by(http, path, plain) == []
    prompt = prompt_of(cluster)
    assert sorted(await ignored_by(http, path, fields)) == sorted(ignored)
    assert prompt_of(cluster) == prompt


async def test_thinking_is_a_hint_to_a_model_that_does_not_reason(
    start_router: StartRouter, model_dir: Path, http: aiohttp.ClientSession
) -> None:
    cluster = await start_router(model_dir)
    await cluster.add_pair()
    async with aiohttp.ClientSession(cluster.url) as plain:
        for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
            fields = {"thinking": thinking}
            assert await ignored_by(plain, "/v1/messages", fields) == ["thinking"]
        assert await ignored_by(plain, "/v1/messages", {"thinking": {"type": "disabled"}}) == []


async def test_refusals_of_earlier_turns_are_their_text(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    part = {"type": "refusal", "refusal": "I cannot."}
    turns = [TURN, {"role": "assistant", "content": "I cannot."}, TURN]
    await ignored_by(http, "/v1/chat/completions", {"messages": turns})
    prompt = prompt_of(cluster)
    assert "I cannot." in prompt
    for said in (
        {"content": [part]},
        {"content": None, "refusal": "I cannot."},
        {"content": "I ", "refusal": "cannot."},
        {"content": [{"type": "text", "text": "I "}, {**part, "refusal": "cannot."}]},
    ):
        turns = [TURN, {"role": "assistant", **said}, TURN]
        await ignored_by(http, "/v1/chat/completions", {"messages": turns})
        assert prompt_of(cluster) == prompt, said
    item = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    await ignored_by(http, "/v1/responses", {"input": [TURN, item, TURN]})
    assert prompt_of(cluster) == prompt
    turns = [{"role": "user", "content": [part]}]
    async with http.post("/v1/chat/completions", json={"messages": turns}) as response:
        assert (await response.json())["error"]["param"] == "messages[0].content[0]"


async def test_empty_turns_of_the_assistant_are_taken(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    empty = {
        "/v1/chat/completions": ["", None, [], [{"type": "text", "text": ""}]],
        "/v1/responses": ["", [], [{"type": "output_text", "text": ""}]],
        "/v1/messages": ["", [], [{"type": "text", "text": ""}]],
    }
    prompts = set()
    for path, contents in empty.items():
        for content in contents:
            turns = [TURN, {"role": "assistant", "content": content}, TURN]
            field = "input" if path == "/v1/responses" else "messages"
            assert await ignored_by(http, path, {field: turns}) == []
            prompts.add(prompt_of(cluster))
    assert len(prompts) == 1


async def test_a_hosted_tool_that_has_to_be_called_is_refused_by_name(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    search, claude = {"type": "web_search"}, {"type": "web_search_20250305", "name": "web_search"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [search]}
    for path, fields, word in (
        ("/v1/chat/completions", {"tools": [search], "tool_choice": search}, "web_search"),
        ("/v1/chat/completions", {"tools": [search], "tool_choice": "required"}, "required"),
        ("/v1/responses", {"tools": [search, FLAT], "tool_choice": search}, "web_search"),
        ("/v1/responses", {"tools": [search, FLAT], "tool_choice": allowed}, "hosted"),
        (
            "/v1/messages",
            {"tools": [claude], "tool_choice": {"type": "tool", "name": "web_search"}},
            "web_search",
        ),
    ):
        async with http.post(path, json={**PATHS[path], **fields}) as response:
            error = (await response.json())["error"]
        assert response.status == 400, path
        assert error["message"].startswith("tool_choice")
        assert word in error["message"]
    fields = {"tools": [search, WEATHER, {**NOW, "function": {"name": "a b"}}]}
    async with http.post("/v1/chat/completions", json={"messages": [TURN], **fields}) as response:
        assert (await response.json())["error"]["param"] == "tools[2].function.name"


def test_hints_are_taken_from_every_item_and_values_that_say_nothing_are_not_told() -> None:
    blocks = [{"text": "a", **MARK}, {"text": "b"}, {"text": "c", **MARK}]
    body = {"messages": [{"content": blocks}, {"content": "x"}, 3], "metadata": {}, "betas": ["b"]}
    assert take_hints(body, Api.MESSAGES) == ["betas", "messages.content.cache_control"]
    assert body == {
        "messages": [
            {"content": [{"text": "a"}, {"text": "b"}, {"text": "c"}]},
            {"content": "x"},
            3,
        ]
    }
    for odd in ({}, {"tools": None}, {"tools": "x"}, {"system": {"cache_control": None}}):
        assert take_hints(dict(odd), Api.MESSAGES) == []
