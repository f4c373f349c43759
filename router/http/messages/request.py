"""A body of ``/v1/messages``, and the chat request that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainValidator

from router.http.schema import ChatRequest, neutral, validated

NAMES = {"stop": "stop_sequences"}
"""Fields of a chat request that have another name here."""
_BLOCK = ("type", "text", "cache_control", "citations")


def _text(path: str, content: object) -> str:
    """A content as one text; it is a string or text blocks, of which all are cached anyway."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{path} must be a string or a list of text blocks".lstrip())
    return "".join(_text_of_block(f"{path}[{n}]", block) for n, block in enumerate(content))


def _text_of_block(path: str, block: object) -> str:
    if not isinstance(block, Mapping):
        raise ValueError(f"{path} must be a text block")
    if block.get("type") != "text":
        kind = block.get("type")
        raise ValueError(f"{path}.type = {kind!r} is not supported by this server. Fix: send text")
    if not isinstance(block.get("text"), str):
        raise ValueError(f"{path}.text must be a string")
    for name, value in block.items():
        if name not in _BLOCK or (name == "citations" and value):
            raise ValueError(f"{path}.{name} is not supported by this server. Fix: leave it out")
    return str(block["text"])


def _system(value: object) -> str | None:
    return None if value is None else _text("", value)


def _turns(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of at least one message")
    return [_turn(f"[{index}]", turn) for index, turn in enumerate(value)]


def _turn(path: str, turn: object) -> dict[str, str]:
    if not isinstance(turn, Mapping):
        raise ValueError(f"{path} must be an object with role and content")
    role = turn.get("role")
    if role not in ("user", "assistant"):
        raise ValueError(f"{path}.role = {role!r}: it must be user or assistant")
    for name in turn:
        if name not in ("role", "content"):
            raise ValueError(f"{path}.{name} is not supported by this server. Fix: leave it out")
    return {"role": role, "content": _text(f"{path}.content", turn.get("content"))}


_Unsupported = Annotated[None, neutral([], {}, {"type": "none"}, {"type": "disabled"})]


class MessagesRequest(BaseModel):
    """``POST /v1/messages``; ranges are checked in the chat request that it becomes."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None
    max_tokens: int
    messages: Annotated[list[dict[str, str]], PlainValidator(_turns)]
    system: Annotated[str | None, PlainValidator(_system)] = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # Harmless: they change no answer here.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None
    tools: _Unsupported = None
    tool_choice: _Unsupported = None
    thinking: _Unsupported = None
    container: _Unsupported = None
    context_management: _Unsupported = None
    mcp_servers: _Unsupported = None
    output_config: _Unsupported = None
    output_format: _Unsupported = None


def as_chat(request: MessagesRequest) -> ChatRequest:
    """The same as a request of ``/v1/chat/completions``; a last turn of the assistant goes on."""
    system = [{"role": "system", "content": request.system}] if request.system else []
    fields: dict[str, object] = {
        "model": request.model,
        "messages": [*system, *request.messages],
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "continue_final_message": request.messages[-1]["role"] == "assistant",
    }
    return validated(fields, ChatRequest)
