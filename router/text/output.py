"""A choice's tokens as text: detokenized, cut at stop strings, with their details.

Text that is held back (an unfinished character, the possible beginning of a stop string) takes the
details of its tokens with it: they come out with the next text or at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.text.detokenizer import Detokenizer
from router.text.stops import StopStrings
from router.text.tokenizer import Vocabulary
from runtime.pb import common_pb2
from runtime.sampling import FinishReason

_NAMES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How one request wants its text."""

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
    token_ids: list[int]
    """Empty unless ``keep_tokens``."""
    logprobs: list[common_pb2.PositionLogprobs]
    finish_reason: str | None


class ChoiceText:
    """The growing output of one choice."""

    __slots__ = (
        "_detokenizer",
        "_ids",
        "_is_plain",
        "_logprobs",
        "_options",
        "_stops",
        "finished",
        "num_tokens",
    )

    def __init__(self, vocabulary: Vocabulary, options: OutputOptions) -> None:
        skip = options.skip_special_tokens
        self._detokenizer = Detokenizer(vocabulary.visible_pieces if skip else vocabulary.pieces)
        self._stops = StopStrings(options.stops, include=options.include_stop)
        self._options = options
        self._is_plain = not (options.stops or options.keep_tokens)
        """Every token's text goes out at once, and nothing but the text."""
        self._ids: list[int] = []
        self._logprobs: list[common_pb2.PositionLogprobs] = []
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
            text = "".join([self._detokenizer.feed(token_id) for token_id in token_ids])
            return Piece(text, self._ids, self._logprobs, None) if text else None
        text = ""
        last = len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if self._options.keep_tokens:
                self._ids.append(token_id)
                self._logprobs.extend(logprobs[position : position + 1])
            if finish is FinishReason.STOP and position == last:
                break  # a stop token is counted but is no text
            more, stopped = self._add_text(self._detokenizer.feed(token_id))
            text += more
            if stopped:
                return self._piece(text, "stop")
        if finish is None:
            return self._piece(text, None) if text else None
        more, stopped = self._add_text(self._detokenizer.flush())
        if stopped:
            return self._piece(text + more, "stop")
        return self._piece(text + more + self._stops.flush(), _NAMES[finish])

    def _add_text(self, text: str) -> tuple[str, bool]:
        if self.num_tokens <= self._options.min_tokens:
            return text, False
        result = self._stops.feed(text)
        return result.text, result.stopped is not None

    def _piece(self, text: str, finish_reason: str | None) -> Piece:
        self.finished = finish_reason is not None
        piece = Piece(text, self._ids, self._logprobs, finish_reason)
        if self._options.keep_tokens:
            self._ids, self._logprobs = [], []
        return piece
