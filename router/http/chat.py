"""Answers of ``/v1/chat/completions``: chunks of a stream, or one body."""

from __future__ import annotations

import orjson

from router.http.logprobs import chat_logprobs
from router.http.response import Choice, Json, ResponseInfo, closing_event, sum_texts
from router.http.sse import TextEvent, event
from router.text.output import Piece
from runtime.pb import prefill_pb2

_CHUNK = "chat.completion.chunk"


class ChatStream:
    """A ``ResponseFormat`` of server-sent events.

    Per choice: a chunk with the role, chunks with text, a chunk with the finish reason; then the
    usage.
    """

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        self._fills_templates = info.plain_text_only
        self._templates: dict[int, TextEvent] = {}

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """The role."""
        extra: Json = {}
        if self._info.wants_token_ids:
            extra["prompt_token_ids"] = choice.prompt.token_ids
        return self._event(choice, {"role": "assistant", "content": ""}, None, None, extra)

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """Text, and the end."""
        data = b""
        if piece.text or piece.token_ids:
            if self._fills_templates:
                data = self._template(choice).fill(piece.text)
            else:
                data = self._detailed(choice, piece)
        if piece.finish_reason is not None:
            data += self._event(choice, {}, None, piece.finish_reason)
        return data

    def closing(self) -> bytes:
        """Usage and timings, where asked for."""
        return closing_event(self._info, _CHUNK)

    def _template(self, choice: Choice) -> TextEvent:
        template = self._templates.get(choice.index)
        if template is None:
            template = TextEvent(self._payload(choice, {"content": TextEvent.HOLE}, None, None))
            self._templates[choice.index] = template
        return template

    def _detailed(self, choice: Choice, piece: Piece) -> bytes:
        info = self._info
        logprobs = None
        if info.wants_logprobs:
            logprobs = chat_logprobs(info.vocabulary, piece.token_ids, piece.logprobs)
        payload = self._payload(choice, {"content": piece.text}, logprobs, None)
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

    def __init__(self, info: ResponseInfo) -> None:
        self._info = info
        self._pieces: dict[int, list[Piece]] = {choice.index: [] for choice in info.choices}

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """Nothing yet."""
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
            "message": {"role": "assistant", "content": sum_texts(pieces), "refusal": None},
            "logprobs": logprobs,
            "finish_reason": pieces[-1].finish_reason,
        }
        if info.wants_token_ids:
            result["token_ids"] = token_ids
        return result
