"""The messages of a chat request, as chat templates take them.

The checks raise ValueError with the place of what is wrong, relative to their field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.http.openai.tools import check_results, checked_calls

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def chat_messages(value: object) -> list[dict[str, Any]]:
    """``messages``: at least one, each with a role and a content that is one text."""
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of at least one message")
    found = [_message(index, item) for index, item in enumerate(value)]
    check_results(found)
    return found


def _message(index: int, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"[{index}] must be an object with role and content")
    role = value.get("role")
    if role not in _ROLES:
        raise ValueError(f"[{index}].role is {role!r}; it must be one of {', '.join(_ROLES)}")
    content = _content(index, role, value.get("content"))
    # Templates of this model family know "system", not its newer name.
    message = {**value, "role": "system" if role == "developer" else role}
    if role == "assistant":
        content = _with_refusal(index, content, message.pop("refusal", None))
        if message.pop("audio", None) is not None:
            raise ValueError(f"[{index}].audio: this model has said nothing aloud; leave it out")
    calls = checked_calls(f"[{index}].tool_calls", message.pop("tool_calls", None))
    if calls:
        if role != "assistant":
            raise ValueError(f"[{index}].tool_calls: only the assistant calls; leave them out")
        message["tool_calls"] = calls
    if content is None and not calls:
        if role != "assistant":
            raise ValueError(f"[{index}].content is missing; send a string")
        content = ""
    message["content"] = content
    return _with_reasoning(index, message)


def _with_reasoning(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """The reasoning of an earlier turn, of both its names under the one that templates read."""
    for name in ("reasoning_content", "reasoning"):
        if not isinstance(message.get(name), str | None):
            raise ValueError(f"[{index}].{name} must be a string")
    if message.get("reasoning_content") is None:
        message.pop("reasoning_content", None)
        if message.get("reasoning") is not None:
            message["reasoning_content"] = message["reasoning"]
    return message


def _with_refusal(index: int, content: str | None, refusal: object) -> str | None:
    """What the assistant said, where it refused in a field of its own."""
    if not isinstance(refusal, str | None):
        raise ValueError(f"[{index}].refusal must be a string")
    return content if refusal is None else (content or "") + refusal


def _content(index: int, role: str, content: object) -> str | None:
    """A message's content as one text: a string, null, or a list of parts that are texts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"[{index}].content must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(content):
        is_refusal = role == "assistant" and isinstance(part, Mapping) and "refusal" in part
        text = part.get("refusal" if is_refusal else "text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(
                f"[{index}].content[{number}] is of type {kind!r}; this model reads text parts only"
            )
        texts.append(text)
    return "".join(texts)
