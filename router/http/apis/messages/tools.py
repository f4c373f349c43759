"""Tools of ``/v1/messages`` as a chat request has them.

The checks raise ValueError with the place of what is wrong, relative to their field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.http.openai.hints import Api, OfferedTools
from router.http.openai.response import Json
from router.http.openai.tools import offered_of

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def tools_of(value: object) -> OfferedTools | None:
    """``tools``: null, or functions; tools of the provider's own are left out."""
    return offered_of(value, Api.MESSAGES, _tool)


def _tool(place: int, tool: object) -> Json:
    where = f"[{place}]"
    if not isinstance(tool, Mapping):
        raise ValueError(f"{where} must be an object with a name and an input_schema")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        fix = 'Fix: send tools of the type "custom"'
        raise ValueError(f"{where}.type = {kind!r} is not supported by this server. {fix}")
    for name, value in tool.items():
        if name in ("type", "name", "description", "input_schema", "strict") or value is None:
            continue
        raise ValueError(f"{where}.{name} is not supported by this server. Fix: leave it out")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise ValueError(f"{where}.input_schema must be an object")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool["input_schema"],
        "strict": tool.get("strict"),
    }
    known = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": known}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """``tool_choice``, as a chat request says it in two fields."""

    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool | None = None


def tool_choice_of(value: object) -> ToolChoice | None:
    """``tool_choice``: null, or an object with a type."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in (*_CHOICES, "tool"):
        kinds = ", ".join((*_CHOICES, "tool"))
        raise ValueError(f".type = {kind!r} is not supported. Fix: send one of {kinds}")
    alone = value.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        raise ValueError(".disable_parallel_tool_use must be true or false")
    for name in value:
        if name not in ("type", "disable_parallel_tool_use", "name"):
            raise ValueError(f".{name} is not supported by this server. Fix: leave it out")
    named = {"type": "function", "function": {"name": value.get("name")}}
    return ToolChoice(
        tool_choice=named if kind == "tool" else _CHOICES[kind],
        parallel_tool_calls=None if alone is None else not alone,
    )
