"""Requests in the shapes of agents that people use, composed from what is publicly known of them.

Each is a conversation of two requests: the model calls a tool, and gets its result; aider, which
offers no tools, just goes on. A shape says which of its fields an answer's header has to name as
ignored.

"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.router.conftest import MODEL

Json = dict[str, Any]
SYSTEM = "You are a coding agent."
TASK = "List the files."
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "what to run"}},
    "required": ["command"],
    "additionalProperties": False,
}
NAME = "run_command"
ABOUT = "Runs a command."
RESULT = "README.md"
REMINDER = "<reminder>be brief</reminder>"

CACHED = {"cache_control": {"type": "ephemeral"}}


@dataclass(frozen=True, kw_only=True)
class Agent:
    """How one agent asks."""

    path: str
    body: Json
    """Of its first request."""
    follow_up: Callable[[Json, Mapping[str, Any]], Json]
    """Its second one: of the first, and the call, by ``id``, ``name`` and ``arguments``."""
    ignored: set[str]
    headers: dict[str, str] = field(default_factory=dict)


def _chat_tool() -> Json:
    function = {"name": NAME, "description": ABOUT, "parameters": PARAMETERS}
    return {"type": "function", "function": function}


def _after_call_of_chat(body: Json, call: Mapping[str, Any]) -> Json:
    function = {"name": call["name"], "arguments": call["arguments"]}
    said = {"id": call["id"], "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
    turns = [{"role": "assistant", "content": "", "tool_calls": [said]}, result]
    return {**body, "messages": [*body["messages"], *turns]}


def _after_answer_of_chat(body: Json, call: Mapping[str, Any]) -> Json:
    turns = [{"role": "assistant", "content": RESULT}, {"role": "user", "content": "And?"}]
    return {**body, "messages": [*body["messages"], *turns]}


def _after_call_of_codex(body: Json, call: Mapping[str, Any]) -> Json:
    thought = {"type": "reasoning", "summary": [], "encrypted_content": None, "content": None}
    said = {"type": "function_call", "name": call["name"], "arguments": call["arguments"]}
    output = {"type": "function_call_output", "call_id": call["id"], "output": RESULT}
    return {**body, "input": [*body["input"], thought, {**said, "call_id": call["id"]}, output]}


def _after_call_of_claude(body: Json, call: Mapping[str, Any]) -> Json:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    use = {"type": "tool_use", "id": call["id"], "name": call["name"], "input": call["arguments"]}
    block = {"type": "tool_result", "tool_use_id": call["id"], "content": RESULT, **CACHED}
    turns = [
        {"role": "assistant", "content": [thought, use]},
        {
            "role": "user",
            "content": [block, {"type": "text", "text": REMINDER}],
        },
    ]
    return {**body, "messages": [*body["messages"], *turns]}


def _item(role: str, text: str) -> Json:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


CODEX = Agent(
    path="/v1/responses",
    body={
        "model": MODEL,
        "instructions": SYSTEM,
        "input": [
            _item("developer", "Ask first."),
            _item("user", "<cwd>/work</cwd>"),
            _item("user", TASK),
        ],
        "tools": [
            {"type": "function", "name": NAME, "description": ABOUT, "strict": False}
            | {"parameters": PARAMETERS},
            {"type": "custom", "name": "apply_patch", "description": "Edits files."}
            | {"format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
            {"type": "web_search", "external_web_access": True},
            {"type": "image_generation", "output_format": "png"},
            {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": []},
            {"type": "tool_search", "execution": "client"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-session",
        "text": {"verbosity": "low"},
        "client_metadata": {"installation": "x"},
    },
    follow_up=_after_call_of_codex,
    ignored={
        *("client_metadata", "include.reasoning.encrypted_content", "reasoning.effort"),
        *("reasoning.summary", "text.verbosity", "tools.custom", "tools.image_generation"),
        *("tools.namespace", "tools.tool_search", "tools.web_search"),
    },
    headers={"originator": "codex", "session_id": "0199-session", "version": "1.0.0"},
)
CLAUDE_CODE = Agent(
    path="/v1/messages?beta=true",
    body={
        "model": MODEL,
        "max_tokens": 32000,
        "system": [{"type": "text", "text": SYSTEM, **CACHED}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": REMINDER},
                    {"type": "text", "text": TASK, **CACHED},
                ],
            }
        ],
        "tools": [
            {
                "name": NAME,
                "description": ABOUT,
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    **PARAMETERS,
                },
                "eager_input_streaming": True,
            },
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": "user_x_session_y"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
    },
    follow_up=_after_call_of_claude,
    ignored={
        *("context_management", "messages.content.cache_control", "metadata"),
        *("output_config.effort", "system.cache_control", "tools.eager_input_streaming"),
        "tools.web_search_20250305",
    },
    headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a-2025-01-01,b-2025-02-02"},
)
OPENCODE = Agent(
    path="/v1/chat/completions",
    body={
        "model": MODEL,
        "max_tokens": 32000,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": [{"type": "text", "text": TASK}]},
        ],
        "tools": [_chat_tool()],
        "tool_choice": "auto",
        "reasoning_effort": "medium",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    follow_up=_after_call_of_chat,
    ignored={"reasoning_effort"},
)
AIDER = Agent(
    path="/v1/chat/completions",
    body={
        "model": MODEL,
        "temperature": 0,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": SYSTEM, **CACHED}]},
            {"role": "user", "content": "An example."},
            {"role": "assistant", "content": "Ok."},
            {"role": "user", "content": [{"type": "text", "text": TASK, **CACHED}]},
        ],
        "reasoning_effort": "high",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    follow_up=_after_answer_of_chat,
    ignored={"messages.content.cache_control", "reasoning_effort"},
)
CLINE = Agent(
    path="/v1/chat/completions",
    body={
        "model": MODEL,
        "temperature": 0,
        "max_tokens": 8192.0,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": [{"type": "text", "text": f"<task>{TASK}</task>"}]},
        ],
        "tools": [_chat_tool()],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning_effort": "medium",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    follow_up=_after_call_of_chat,
    ignored={"reasoning_effort"},
)
OPEN_WEBUI = Agent(
    path="/v1/chat/completions/",
    body={
        "model": MODEL,
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}],
        "tools": [_chat_tool()],
        "params": {},
        "user": {"id": "x", "name": "me"},
        "metadata": {"chat_id": "x"},
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    follow_up=_after_call_of_chat,
    ignored={"metadata", "params", "user"},
)
AGENTS = {
    "codex": CODEX,
    "claude-code": CLAUDE_CODE,
    "opencode": OPENCODE,
    "aider": AIDER,
    "cline": CLINE,
    "open-webui": OPEN_WEBUI,
}
