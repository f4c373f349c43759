"""Turns of ``/v1/messages`` as messages of a chat: texts, thoughts, calls and their results.

Blocks of one turn of the assistant are one message, as long as they come in the order thoughts,
text, calls; results and texts of the user are messages of their own, in order. The checks raise
ValueError with the place of what is wrong, relative to their field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.http.openai.response import Json

FAILED_RESULT = "Error: "
"""Goes before the result of a tool that failed: chat templates have no other word for it."""
_ROLES = ("user", "assistant", "system")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What a request's messages say."""

    messages: list[Json] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    """The number of the turn that each message comes from."""

    @property
    def ends_with_assistant(self) -> bool:
        """Whether the answer goes on with the last turn."""
        return self.messages[-1]["role"] == "assistant"


def turns_of(value: object) -> Turns:
    """``messages``: turns of the user, the assistant and the system.

    Raises:
        ValueError: anything else, or a block that is not supported.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of at least one message")
    turns = Turns()
    for number, turn in enumerate(value):
        for message in _messages(f"[{number}]", turn):
            turns.messages.append(message)
            turns.origins.append(number)
    if turns.messages[-1].get("tool_calls"):
        raise ValueError(f"[{len(value) - 1}].content ends with a call. Fix: send its result")
    return turns


def text_of(where: str, content: object) -> str:
    """A content as one text; it is a string or text blocks."""
    return "".join(_text(place, block) for place, block in _blocks(where, content, ("text",)))


def _messages(where: str, turn: object) -> list[Json]:
    if not isinstance(turn, Mapping):
        raise ValueError(f"{where} must be an object with role and content")
    role = turn.get("role")
    if role not in _ROLES:
        raise ValueError(f"{where}.role = {role!r}: it must be one of {', '.join(_ROLES)}")
    for name in turn:
        if name not in ("role", "content"):
            raise ValueError(f"{where}.{name} is not supported by this server. Fix: leave it out")
    where, content = f"{where}.content", turn.get("content")
    if role == "system":
        return [{"role": "system", "content": text_of(where, content)}]
    return (_of_assistant if role == "assistant" else _of_user)(where, content)


def _of_user(where: str, content: object) -> list[Json]:
    found: list[Json] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            found.append({"role": "user", "content": "".join(texts)})
            texts.clear()

    for place, block in _blocks(where, content, ("text", "tool_result")):
        if block["type"] == "text":
            texts.append(_text(place, block))
        else:
            end_text()
            found.append(_result(place, block))
    end_text()
    return found or [{"role": "user", "content": ""}]


class _Said:
    """One message of the assistant, as its blocks come."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[Json] = []

    def message(self) -> Json:
        found: Json = {"role": "assistant", "content": "".join(self.texts)}
        if self.thoughts:
            found["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            found["tool_calls"] = self.calls
            found["content"] = found["content"] or None
        return found


def _of_assistant(where: str, content: object) -> list[Json]:
    found = [_Said()]
    for place, block in _blocks(where, content, ("thinking", "text", "tool_use")):
        if block["type"] == "tool_use":
            found[-1].calls.append(_call(place, block))
            continue
        if found[-1].calls:  # what comes behind calls is another message
            found.append(_Said())
        if block["type"] == "thinking":
            found[-1].thoughts.append(_thought(place, block))
        else:
            found[-1].texts.append(_text(place, block))
    return [said.message() for said in found]


def _text(where: str, block: Mapping[str, Any]) -> str:
    _refuse_others(where, block, ("text",), harmless={"citations": ([],)})
    return _string(where, block, "text")


def _thought(where: str, block: Mapping[str, Any]) -> str:
    _refuse_others(where, block, ("thinking", "signature"))
    return _string(where, block, "thinking")


def _call(where: str, block: Mapping[str, Any]) -> Json:
    _refuse_others(
        where, block, ("id", "name", "input"), harmless={"caller": ({"type": "direct"},)}
    )
    if not isinstance(block.get("input"), Mapping):
        raise ValueError(f"{where}.input must be an object")
    function = {
        "name": _string(where, block, "name"),
        "arguments": orjson.dumps(block["input"]).decode(),
    }
    return {"id": _string(where, block, "id"), "type": "function", "function": function}


def _result(where: str, block: Mapping[str, Any]) -> Json:
    _refuse_others(where, block, ("tool_use_id", "content", "is_error"))
    content = block.get("content")
    text = "" if content is None else text_of(f"{where}.content", content)
    if not isinstance(block.get("is_error"), bool | None):
        raise ValueError(f"{where}.is_error must be true or false")
    if block.get("is_error"):
        text = FAILED_RESULT + text
    tool_use_id = _string(where, block, "tool_use_id")
    return {"role": "tool", "tool_call_id": tool_use_id, "content": text}


def _blocks(
    where: str, content: object, kinds: tuple[str, ...]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The blocks of a content with their places; a string is one block of text."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError(f"{where} must be a string or a list of blocks".lstrip())
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        if not isinstance(block, Mapping):
            raise ValueError(f"{place} must be an object with a type")
        kind = block.get("type")
        if kind not in kinds:
            fix = f"Fix: send {' or '.join(kinds)}"
            raise ValueError(f"{place}.type = {kind!r} is not supported by this server. {fix}")
        yield place, block


def _string(where: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{where}.{name} must be a string")
    return value


def _refuse_others(
    where: str,
    block: Mapping[str, Any],
    known: tuple[str, ...],
    *,
    harmless: Mapping[str, tuple[object, ...]] | None = None,
) -> None:
    """Refuse fields that nobody here reads, but for null and values that say nothing."""
    for name, value in block.items():
        if name in known or name == "type" or value is None:
            continue
        if value not in (harmless or {}).get(name, ()):
            raise ValueError(f"{where}.{name} is not supported by this server. Fix: leave it out")
