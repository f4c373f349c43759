"""Input items as messages: texts, earlier thoughts and calls, and their results.

The thoughts, the text and the calls of one turn of the assistant are items of their own here, and
one message of a chat. The checks raise ValueError with the place of what is wrong in the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_ROLES = ("user", "system", "developer", "assistant")
_TEXTS = {"input_text": "text", "output_text": "text"}
"""Parts that are texts, and the field that each has its text in."""
_OF_ASSISTANT = {**_TEXTS, "refusal": "refusal"}
"""What it refused once is what it said."""
_OF_ITEM = ("type", "id", "status")
"""Fields of any item that change no answer, but for the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a request's input says."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    """The number of the item with which each message begins."""


def conversation_of(value: object) -> Conversation:
    """``input``: a text of the user, or items.

    Raises:
        ValueError: neither, or an item that is not supported.
    """
    found = Conversation()
    if isinstance(value, str):
        found.messages.append({"role": "user", "content": value})
        found.origins.append(0)
        return found
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of at least one item")
    for number, item in enumerate(value):
        _take(found, number, item)
    return found


def _take(found: Conversation, number: int, item: object) -> None:
    where = f"[{number}]"
    if not isinstance(item, Mapping):
        raise ValueError(f"{where} must be an object with a type")
    kind = item.get("type") or "message"
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise ValueError(
            f"{where}.type = {kind!r} is not supported by this server. "
            f"Fix: send one of {', '.join(_READERS)}"
        )
    message = reader(where, item)
    last = found.messages[-1] if found.messages else None
    if last is None or not _belongs_to(last, message):
        found.messages.append(message)
        found.origins.append(number)
    elif message.get("tool_calls"):
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
    else:
        last["content"] = message["content"]


def _belongs_to(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether ``message`` goes on with the turn of ``last``: thoughts, then text, then calls."""
    if last.get("role") != "assistant" or message["role"] != "assistant":
        return False
    if message.get("tool_calls"):
        return True
    return message["content"] is not None and last["content"] is None and "tool_calls" not in last


def _message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise ValueError(f"{where}.role is {role!r}; it must be one of {', '.join(_ROLES)}")
    _refuse_others(where, item, ("role", "content", "phase"))
    kinds = _OF_ASSISTANT if role == "assistant" else _TEXTS
    return {"role": role, "content": _text(f"{where}.content", item.get("content"), kinds)}


def _call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others(where, item, ("call_id", "name", "arguments"), refused=("namespace", "caller"))
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise ValueError(f"{where}.{name} must be a string")
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _result(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others(where, item, ("call_id", "output", "name"), refused=("namespace", "caller"))
    if not isinstance(item.get("call_id"), str):
        raise ValueError(f"{where}.call_id must be a string: that of the call")
    content = _text(f"{where}.output", item.get("output"))
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def _reasoning(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others(where, item, ("content", "summary"), refused=("encrypted_content",))
    text = ""
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        if item.get(name):  # the thoughts themselves, where they are there
            text = _text(f"{where}.{name}", item[name], {kind: "text"})
    return {"role": "assistant", "content": None, "reasoning_content": text}


_READERS: Mapping[str, Callable[[str, Mapping[str, Any]], dict[str, Any]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _result,
    "reasoning": _reasoning,
}


def _text(where: str, content: object, kinds: Mapping[str, str] = _TEXTS) -> str:
    """A string, or parts of these ``kinds``, each of which has its text in a field."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} must be a string or a list of parts")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        name = kinds.get(kind) if isinstance(kind, str) else None
        if name is None:
            raise ValueError(
                f"{where}[{number}].type = {kind!r} is not supported by this server. "
                f"Fix: send {' or '.join(kinds)}"
            )
        text = part.get(name)
        if not isinstance(text, str):
            raise ValueError(f"{where}[{number}].{name} must be a string")
        texts.append(text)
    return "".join(texts)


def _refuse_others(
    where: str, item: Mapping[str, Any], known: tuple[str, ...], *, refused: tuple[str, ...] = ()
) -> None:
    """Refuse fields that nobody here reads; null says nothing."""
    for name, value in item.items():
        if name in known or name in _OF_ITEM or value is None:
            continue
        what = "is not supported by this server" if name in refused else "is no field of this item"
        raise ValueError(f"{where}.{name} {what}. Fix: leave it out")
