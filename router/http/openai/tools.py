"""What clients say of tools: those offered, the calls of earlier turns and their results.

The checks raise ValueError with the place of what is wrong, relative to their field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.http.openai.hints import Api, OfferedTools, is_hosted

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedTools:
    """Those of the tools that may be called, though the model is told of all."""

    names: frozenset[str]
    is_required: bool
    """Whether one has to be called."""


def allowed_tools_of(choice: object) -> AllowedTools | None:
    """What a ``tool_choice`` of the type "allowed_tools" says; None: it is of another."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return None
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, Mapping):
        raise ValueError("has no allowed_tools. Fix: send an object with mode and tools")
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise ValueError(f'has the mode {mode!r}. Fix: send "auto" or "required"')
    if not isinstance(tools, list) or not tools:
        raise ValueError("allows none of the tools. Fix: send a list of at least one")
    names = []
    for index, tool in enumerate(tools):
        if isinstance(tool, Mapping) and is_hosted(tool.get("type"), Api.CHAT):
            continue
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise ValueError(f'allows tools[{index}], which is none. Fix: send the type "function"')
        names.append(_checked_name(f"has tools[{index}], whose name", function.get("name")))
    if not names:
        raise ValueError("allows hosted tools alone, which are not here. Fix: allow a function")
    return AllowedTools(names=frozenset(names), is_required=mode == "required")


def checked_choice(
    value: str | dict[str, Any] | None,
) -> str | dict[str, Any] | None:
    """``tool_choice``, whose allowed tools, if it has some, are named."""
    allowed_tools_of(value)
    kind = value.get("type") if isinstance(value, dict) else None
    if is_hosted(kind, Api.CHAT):
        raise ValueError(requires(kind))
    return value


def requires(kind: object) -> str:
    """Why a choice of a hosted tool of the type ``kind`` is refused."""
    return f"requires a tool of the type {kind!r}, which is not here. Fix: choose a function"


def listed_tools(value: object) -> list[Any] | None:
    """``tools`` of any API: null, or a list."""
    if not isinstance(value, list | None):
        raise ValueError("must be a list of tools")
    return value


def offered_of(
    value: object, api: Api, function_of: Callable[[int, object], dict[str, Any]]
) -> OfferedTools | None:
    """``tools`` of any API: null, or a list; those that are hosted elsewhere are left out.

    Args:
        value: as it was sent.
        api: whose hosted tools there may be.
        function_of: makes any other tool one of a chat request; it is given its place, too.
    """
    tools = listed_tools(value)
    if tools is None:
        return None
    functions, places, hosted = [], [], []
    for place, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if is_hosted(kind, api):
            hosted.append(str(kind))
        else:
            functions.append(function_of(place, tool))
            places.append(place)
    return OfferedTools(functions, places, hosted)


def checked_tools(value: object) -> OfferedTools | None:
    """``tools``: null, or a list of functions with names of their own."""
    names: set[str] = set()

    def checked(index: int, tool: object) -> dict[str, Any]:
        function = _checked_tool(index, tool)
        name = function["function"]["name"]
        if name in names:
            raise ValueError(
                f"[{index}].function.name is {name!r} a second time. Fix: name it otherwise"
            )
        names.add(name)
        return function

    return offered_of(value, Api.CHAT, checked)


def _checked_tool(index: int, tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise ValueError(f'[{index}] must be an object of type "function"')
    if tool.get("type") != "function":
        raise ValueError(f'[{index}].type is {tool.get("type")!r}. Fix: send the type "function"')
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ValueError(f"[{index}].function must be an object with a name")
    _checked_name(f"[{index}].function.name", function.get("name"))
    if not isinstance(function.get("description"), str | None):
        raise ValueError(f"[{index}].function.description must be a string")
    if not isinstance(function.get("parameters"), dict | None):
        raise ValueError(f"[{index}].function.parameters must be an object")
    if not isinstance(function.get("strict"), bool | None):
        raise ValueError(f"[{index}].function.strict must be true or false")
    return tool


def _checked_name(where: str, name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{where} is {name!r}; it must be 1 to 64 letters, digits, dots, dashes and underscores"
        )
    return name


def checked_calls(where: str, value: object) -> list[dict[str, Any]]:
    """``tool_calls`` of a message, none where it is null."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list of calls")
    for index, call in enumerate(value):
        _check_call(f"{where}[{index}]", call)
    return value


def _check_call(where: str, call: object) -> None:
    if not isinstance(call, dict):
        raise ValueError(f'{where} must be an object of type "function"')
    if not isinstance(call.get("id"), str):
        raise ValueError(f"{where}.id must be a string")
    if call.get("type") != "function":
        raise ValueError(f'{where}.type is {call.get("type")!r}; it must be "function"')
    function = call.get("function")
    if not isinstance(function, dict):
        raise ValueError(f"{where}.function must be an object with name and arguments")
    _checked_name(f"{where}.function.name", function.get("name"))
    if not isinstance(function.get("arguments"), str):
        raise ValueError(f"{where}.function.arguments must be a string of JSON")


def check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Each message of a tool answers a call of an earlier message."""
    known: set[str] = set()
    for index, message in enumerate(messages):
        known.update(call["id"] for call in message.get("tool_calls", ()))
        if message["role"] != "tool":
            continue
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str):
            raise ValueError(f"[{index}].tool_call_id must be a string: the id of the call")
        if call_id not in known:
            raise ValueError(
                f"[{index}].tool_call_id is {call_id!r}, which no earlier message calls; "
                "send the assistant's message with the call before it"
            )
