"""A choice's tokens as text: detokenized, cut at stop strings, read as a message, with details.

Stop strings are looked for in all that is no reasoning, calls included. Text that is held back (an
unfinished character, the possible beginning of a stop string or of a mark) takes the details of its
tokens with it: they come out with the next text or at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.text.calls.events import Content
from router.text.detokenizer import Detokenizer
from router.text.message import MessageReader
from router.text.parts import Part
from router.text.pieces import JsonPieces
from router.text.stops import StopStrings
from router.text.tokenizer import Vocabulary
from runtime.pb import common_pb2
from runtime.sampling import FinishReason

_NAMES = {FinishReason.STOP: "stop", FinishReason.COMPLETE: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True, kw_only=True)
class OutputOptions:
    """How one request wants its text; nobody changes it."""

    stops: Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings count from here on."""
    keep_tokens: bool = False
    """Whether token ids and logprobs are kept for the client."""


@dataclass(slots=True)
class Piece:
    """What became known of a choice at once."""

    text: str
    """Of the answer."""
    token_ids: list[int]
    """Empty unless ``keep_tokens``."""
    logprobs: list[common_pb2.PositionLogprobs]
    finish_reason: str | None
    parts: list[Part] | None = None
    """All that was said, where that is more than ``text``."""


class ChoiceText:
    """The growing output of one choice."""

    __slots__ = (
        "_detokenizer",
        "_ids",
        "_is_plain",
        "_logprobs",
        "_num_reasoning_tokens",
        "_options",
        "_pieces",
        "_reader",
        "_stops",
        "finished",
        "json_pieces",
        "num_tokens",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: OutputOptions,
        reader: MessageReader | None = None,
    ) -> None:
        """``reader``: reads the text as a message; None: all of it is the answer."""
        visible = vocabulary.visible_pieces if reader is None else reader.visible_pieces
        self._pieces = visible if options.skip_special_tokens else vocabulary.pieces
        self._detokenizer = Detokenizer(self._pieces)
        self._reader = reader
        self._stops = StopStrings(options.stops, include=options.include_stop)
        if reader is not None and options.stops:
            reader.watch(self._stops)
        self._options = options
        self._is_plain = not (options.stops or options.keep_tokens or reader)
        """Every token's text goes out at once, and nothing but the text."""
        self.json_pieces: JsonPieces | None = self._pieces.json if self._is_plain else None
        """By id, all that the next token says, where it is known of the id alone; None: it is not.

        Who sends that does not ``feed`` the token, and counts it in ``num_tokens``.
        """
        self._ids: list[int] = []
        self._logprobs: list[common_pb2.PositionLogprobs] = []
        self._num_reasoning_tokens = 0
        self.num_tokens = 0
        """Output tokens so far, stop tokens included."""
        self.finished = False

    def feed(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        finish: FinishReason | None,
    ) -> Piece | None:
        """Add tokens; None where nothing can be said yet. Not to be called once ``finished``."""
        assert not self.finished
        if self._is_plain and finish is None:  # nearly every token of a stream
            self.num_tokens += len(token_ids)
            text = self._detokenizer.feed_all(token_ids)
            is_between = self._detokenizer.is_between_characters
            self.json_pieces = self._pieces.json if is_between else None
            return Piece(text, self._ids, self._logprobs, None) if text else None
        self.json_pieces = None
        text = ""
        last = len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if self._options.keep_tokens:
                self._ids.append(token_id)
                self._logprobs.extend(logprobs[position : position + 1])
            if finish is FinishReason.STOP and position == last:
                break  # a stop token is counted but is no text
            more, ends = self._add_token(token_id)
            text += more
            if ends:
                return self._end(text, None)
        if finish is None:
            return self._piece(text, None)
        rest = self._detokenizer.flush()
        if self._reader is not None:
            self._reader.feed(rest)
        else:
            more, stopped = self._add_text(rest)
            text += more if stopped else more + self._stops.flush()
        return self._end(text, finish)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the output, once one did."""
        return self._stops.stopped

    @property
    def num_reasoning_tokens(self) -> int:
        """Of the output tokens so far, those of the reasoning."""
        return (
            self._num_reasoning_tokens
            if self._reader is None
            else (self._reader.num_reasoning_tokens)
        )

    def _add_token(self, token_id: int) -> tuple[str, bool]:
        """The text that a token sets free, and whether the output ends here."""
        text, reader = self._detokenizer.feed(token_id), self._reader
        if reader is None:
            return self._add_text(text)
        stops_count = self.num_tokens > self._options.min_tokens
        reader.tell(token_id, len(text), stops_count=stops_count)
        reader.feed(text)
        return "", reader.is_full

    def _add_text(self, text: str) -> tuple[str, bool]:
        if self.num_tokens <= self._options.min_tokens:
            return text, False
        result = self._stops.feed(text)
        return result.text, result.stopped is not None

    def _end(self, text: str, finish: FinishReason | None) -> Piece | None:
        """The last piece; ``finish`` None: the output ends for what it says."""
        self.finished = True
        if self._reader is not None:
            self._reader.flush(is_cut=finish is FinishReason.LENGTH)
        return self._piece(text, self._reason(None if self.stopped_by is not None else finish))

    def _reason(self, finish: FinishReason | None) -> str:
        """Why the output ended; ``finish`` None: for what it says, not by its last token."""
        reader = self._reader
        if finish is FinishReason.LENGTH:
            return _NAMES[finish]
        if reader is None or not reader.num_calls or (finish is None and reader.is_call_open):
            return _NAMES[FinishReason.STOP]
        return "tool_calls"

    def _piece(self, text: str, finish_reason: str | None) -> Piece | None:
        parts = None
        if self._reader is not None:
            parts = self._take_parts(self._reader)
            text = "".join([part.text for part in parts if isinstance(part, Content)])
            if not parts or (len(parts) == 1 and isinstance(parts[0], Content)):
                parts = None
        if finish_reason is None and not text and parts is None:
            return None
        piece = Piece(text, self._ids, self._logprobs, finish_reason, parts)
        if self._options.keep_tokens:
            self._ids, self._logprobs = [], []
        return piece

    def _take_parts(self, reader: MessageReader) -> list[Part]:
        """What is known; a reader that has nothing left to tell apart is let go of."""
        if reader.is_over and not self.finished:
            reader.let_go()
            self._num_reasoning_tokens = reader.num_reasoning_tokens
            self._reader = None
            self._is_plain = not (self._options.stops or self._options.keep_tokens)
        return reader.take()
