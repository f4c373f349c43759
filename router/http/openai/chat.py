"""Answers of ``/v1/chat/completions``: chunks of a stream, or one body."""

from __future__ import annotations

import secrets

import orjson

from router.http.openai.logprobs import chat_logprobs, prompt_logprobs
from router.http.openai.response import Choice, Json, ResponseInfo, closing_event, sum_texts
from router.http.wire.sse import TextEvent, event
from router.text.calls.events import Content
from router.text.output import Piece
from router.text.parts import CallDelta, Part
from router.text.reasoning import Reasoning
from runtime.pb import prefill_pb2

_CHUNK = "chat.completion.chunk"


class ChatStream:
    """A ``ResponseFormat`` of server-sent events.

    Per choice: a chunk with the role, chunks with text, reasoning or calls, a chunk with the finish
    reason; then the usage.
    """

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        self._fills_templates = info.plain_text_only
        self._templates: dict[int, TextEvent] = {}
        self._reasoning_templates: dict[int, TextEvent] = {}

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """The role."""
        extra: Json = {}
        if self._info.wants_token_ids:
            extra["prompt_token_ids"] = choice.prompt.token_ids
        return self._event(choice, {"role": "assistant", "content": ""}, None, None, extra)

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """Text, and the end."""
        data = b""
        if piece.parts is not None:
            data = self._parts(choice, piece, piece.parts)
        elif piece.text or piece.token_ids:
            if self._fills_templates:
                data = self._template(choice).fill(piece.text)
            else:
                data = self._detailed(choice, piece, {"content": piece.text})
        if piece.finish_reason is not None:
            data += self._event(choice, {}, None, piece.finish_reason)
        return data

    def closing(self) -> bytes:
        """Usage and timings, where asked for."""
        return closing_event(self._info, _CHUNK)

    def text_event(self, choice: Choice) -> TextEvent | None:
        """What every piece of text alone is."""
        return self._template(choice) if self._fills_templates else None

    def _template(self, choice: Choice) -> TextEvent:
        template = self._templates.get(choice.index)
        if template is None:
            template = TextEvent(self._payload(choice, {"content": TextEvent.HOLE}, None, None))
            self._templates[choice.index] = template
        return template

    def _reasoning_template(self, choice: Choice) -> TextEvent:
        template = self._reasoning_templates.get(choice.index)
        if template is None:
            template = TextEvent(self._payload(choice, _reasoning(TextEvent.HOLE), None, None))
            self._reasoning_templates[choice.index] = template
        return template

    def _parts(self, choice: Choice, piece: Piece, parts: list[Part]) -> bytes:
        """A chunk for each part: many clients look for one of them in a chunk. Details go first."""
        if self._fills_templates and len(parts) == 1 and isinstance(parts[0], Reasoning):
            return self._reasoning_template(choice).fill(parts[0].text)
        deltas = [_delta(part) for part in parts]
        data = self._detailed(choice, piece, deltas[0])
        return data + b"".join(self._event(choice, delta, None, None) for delta in deltas[1:])

    def _detailed(self, choice: Choice, piece: Piece, delta: Json) -> bytes:
        info = self._info
        logprobs = None
        if info.wants_logprobs:
            logprobs = chat_logprobs(info.vocabulary, piece.token_ids, piece.logprobs)
        payload = self._payload(choice, delta, logprobs, None)
        if info.wants_token_ids:
            payload["choices"][0]["token_ids"] = piece.token_ids  # type: ignore[index]
        return event(payload)

    def _event(
        self,
        choice: Choice,
        delta: Json,
        logprobs: Json | None,
        finish_reason: str | None,
        extra: Json | None = None,
    ) -> bytes:
        return event({**self._payload(choice, delta, logprobs, finish_reason), **(extra or {})})

    def _payload(
        self, choice: Choice, delta: Json, logprobs: Json | None, finish_reason: str | None
    ) -> Json:
        return self._info.chunk(
            _CHUNK,
            {
                "index": choice.index,
                "delta": delta,
                "logprobs": logprobs,
                "finish_reason": finish_reason,
            },
        )


class ChatBody:
    """A ``ResponseFormat`` of one JSON body."""

    def __init__(self, info: ResponseInfo, *, tells_reasoning: bool = False) -> None:
        """``tells_reasoning``: messages have its fields, null where there was none."""
        self._info = info
        self._tells_reasoning = tells_reasoning
        self._of_prompt: list[Json | None] = []
        self._pieces: dict[int, list[Piece]] = {choice.index: [] for choice in info.choices}

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """Nothing yet."""
        if self._info.wants_prompt_logprobs and not choice.index:
            vocabulary, token_ids = self._info.vocabulary, choice.prompt.token_ids
            self._of_prompt = prompt_logprobs(vocabulary, token_ids, first.prompt_logprobs)
        return b""

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """Nothing yet."""
        self._pieces[choice.index].append(piece)
        return b""

    def closing(self) -> bytes:
        """The body."""
        info = self._info
        body = info.body("chat.completion", [self._choice(choice) for choice in info.choices])
        if info.wants_token_ids:
            body["prompt_token_ids"] = info.choices[0].prompt.token_ids
        if info.wants_prompt_logprobs:
            body["prompt_logprobs"] = self._of_prompt
        return orjson.dumps(body)

    def _choice(self, choice: Choice) -> Json:
        info = self._info
        pieces = self._pieces[choice.index]
        token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
        positions = [position for piece in pieces for position in piece.logprobs]
        logprobs = None
        if info.wants_logprobs:
            logprobs = chat_logprobs(info.vocabulary, token_ids, positions)
        result: Json = {
            "index": choice.index,
            "message": self._message(pieces),
            "logprobs": logprobs,
            "finish_reason": pieces[-1].finish_reason,
        }
        if info.wants_token_ids:
            result["token_ids"] = token_ids
        return result

    def _message(self, pieces: list[Piece]) -> Json:
        parts = [part for piece in pieces for part in piece.parts or ()]
        content: str | None = sum_texts(pieces)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self._tells_reasoning:
            reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
            message |= _reasoning(reasoning or None)
        calls = _whole_calls([part for part in parts if isinstance(part, CallDelta)])
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return message


def _delta(part: Part) -> Json:
    """One part of a message as clients add it up."""
    match part:
        case Reasoning(text):
            return _reasoning(text)
        case Content(text):
            return {"content": text}
        case CallDelta(index, None, arguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
        case CallDelta(index, name, arguments, call_id):
            return {"tool_calls": [{"index": index, **_call(str(name), arguments, call_id)}]}


def _reasoning(text: str | None) -> Json:
    """Under both names: clients look for one or the other."""
    return {"reasoning_content": text, "reasoning": text}


def _call(name: str, arguments: str, call_id: str | None) -> Json:
    return {
        "id": call_id or f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _whole_calls(deltas: list[CallDelta]) -> list[Json]:
    arguments: dict[int, str] = {}
    firsts: dict[int, CallDelta] = {}
    for delta in deltas:
        arguments[delta.call] = arguments.get(delta.call, "") + delta.arguments
        if delta.name is not None:
            firsts[delta.call] = delta
    return [
        _call(str(first.name), arguments[number], first.call_id) for number, first in firsts.items()
    ]
