"""Answers of ``/v1/completions``: a stream or one body; ``echo`` puts the prompt first."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from router.http.openai.logprobs import CompletionLogprobs, joined, prompt_logprobs
from router.http.openai.response import Choice, Json, ResponseInfo, closing_event, sum_texts
from router.http.wire.sse import TextEvent, event
from router.text.detokenizer import Detokenizer
from router.text.output import Piece
from runtime.pb import common_pb2, prefill_pb2

_KIND = "text_completion"


class CompletionText:
    """Texts and logprobs of all choices, as both formats need them."""

    def __init__(self, info: ResponseInfo, *, echo: bool, skip_special_tokens: bool) -> None:
        self._info = info
        self._echo = echo
        vocabulary = info.vocabulary
        self._table = vocabulary.visible_pieces if skip_special_tokens else vocabulary.pieces
        self._logprobs = {
            choice.index: CompletionLogprobs(vocabulary, self._table) for choice in info.choices
        }

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> tuple[str, Json | None]:
        """The echoed prompt, empty where none is wanted, and its logprobs."""
        if not self._echo:
            return "", None
        prompt = choice.prompt
        text = prompt.text if prompt.text is not None else _decode(self._table, prompt.token_ids)
        if not self._info.wants_logprobs:
            return text, None
        positions: list[common_pb2.PositionLogprobs | None] = [None, *first.prompt_logprobs]
        return text, self._logprobs[choice.index].render(prompt.token_ids, positions)

    def logprobs(self, choice: Choice, piece: Piece) -> Json | None:
        """The logprobs of one piece."""
        if not self._info.wants_logprobs:
            return None
        return self._logprobs[choice.index].render(piece.token_ids, piece.logprobs)


def _decode(table: Sequence[bytes], token_ids: list[int]) -> str:
    detokenizer = Detokenizer(table)
    return detokenizer.feed_all(token_ids) + detokenizer.flush()


class CompletionStream:
    """A ``ResponseFormat`` of server-sent events: the echo, text, finish reasons, usage."""

    def __init__(self, info: ResponseInfo, text: CompletionText) -> None:
        self._info = info
        self._text = text
        self._fills_templates = info.plain_text_only
        self._templates: dict[int, TextEvent] = {}

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """The echoed prompt."""
        text, logprobs = self._text.opening(choice, first)
        wants_ids = self._info.wants_token_ids
        if not text and not wants_ids:
            return b""
        extra: Json = {"prompt_token_ids": choice.prompt.token_ids} if wants_ids else {}
        return event(self._payload(choice, text, logprobs, None, extra))

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """Text, and the end."""
        data = b""
        if piece.text or piece.token_ids:
            if self._fills_templates:
                data = self._template(choice).fill(piece.text)
            else:
                wants_ids = self._info.wants_token_ids
                extra: Json = {"token_ids": piece.token_ids} if wants_ids else {}
                logprobs = self._text.logprobs(choice, piece)
                data = event(self._payload(choice, piece.text, logprobs, None, extra))
        if piece.finish_reason is not None:
            data += event(self._payload(choice, "", None, piece.finish_reason, {}))
        return data

    def closing(self) -> bytes:
        """Usage and timings, where asked for."""
        return closing_event(self._info, _KIND)

    def text_event(self, choice: Choice) -> TextEvent | None:
        """What every piece of text alone is."""
        return self._template(choice) if self._fills_templates else None

    def _template(self, choice: Choice) -> TextEvent:
        template = self._templates.get(choice.index)
        if template is None:
            template = TextEvent(self._payload(choice, TextEvent.HOLE, None, None, {}))
            self._templates[choice.index] = template
        return template

    def _payload(
        self,
        choice: Choice,
        text: str,
        logprobs: Json | None,
        finish_reason: str | None,
        extra: Json,
    ) -> Json:
        return self._info.chunk(
            _KIND,
            {
                "index": choice.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": finish_reason,
                **extra,
            },
        )


class CompletionBody:
    """A ``ResponseFormat`` of one JSON body."""

    def __init__(self, info: ResponseInfo, text: CompletionText) -> None:
        self._info = info
        self._text = text
        self._of_prompts: dict[int, list[Json | None]] = {}
        self._echoes: dict[int, tuple[str, Json | None]] = {}
        self._pieces: dict[int, list[Piece]] = {choice.index: [] for choice in info.choices}

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """Nothing yet."""
        self._echoes[choice.index] = self._text.opening(choice, first)
        if self._info.wants_prompt_logprobs:
            self._of_prompts[choice.index] = prompt_logprobs(
                self._info.vocabulary, choice.prompt.token_ids, first.prompt_logprobs
            )
        return b""

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """Nothing yet."""
        self._pieces[choice.index].append(piece)
        return b""

    def closing(self) -> bytes:
        """The body."""
        choices = [self._choice(choice) for choice in self._info.choices]
        return orjson.dumps(self._info.body(_KIND, choices))

    def _choice(self, choice: Choice) -> Json:
        info = self._info
        pieces = self._pieces[choice.index]
        echo, echo_logprobs = self._echoes[choice.index]
        parts = [echo_logprobs, *(self._text.logprobs(choice, piece) for piece in pieces)]
        present = [part for part in parts if part is not None]
        result: Json = {
            "index": choice.index,
            "text": echo + sum_texts(pieces),
            "logprobs": joined(present) if info.wants_logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
        }
        if info.wants_prompt_logprobs:
            result["prompt_logprobs"] = self._of_prompts[choice.index]
        if info.wants_token_ids:
            result["prompt_token_ids"] = choice.prompt.token_ids
            result["token_ids"] = [i for piece in pieces for i in piece.token_ids]
        return result
