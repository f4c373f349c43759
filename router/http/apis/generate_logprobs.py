"""Log-probabilities in SGLang's shape: ``[logprob, token id, text or null]`` a token. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.http.openai.logprobs import LOWEST
from router.http.openai.response import Json
from router.text.tokenizer import Vocabulary
from runtime.pb import common_pb2

Entry = list[object]


class ChoiceLogprobs:
    """Those of one choice, as they grow."""

    def __init__(self, vocabulary: Vocabulary, *, num_tops: int, with_text: bool) -> None:
        """``num_tops``: of the likeliest tokens of each position; 0 tells none of them."""
        self._vocabulary = vocabulary
        self._num_tops = num_tops
        self._with_text = with_text
        self._input: list[Entry] = []
        self._input_tops: list[list[Entry] | None] = []
        self._output: list[Entry] = []
        self._output_tops: list[list[Entry] | None] = []

    def add_prompt(
        self,
        token_ids: Sequence[int],
        positions: Sequence[common_pb2.PositionLogprobs],
        start: int,
    ) -> None:
        """The prompt's tokens from number ``start`` on; its first has no probability."""
        known = [None, *positions]
        for token_id, position in zip(token_ids[start:], known[start:], strict=True):
            if position is None:
                self._input.append(self._entry(None, token_id))
                self._input_tops.append(None)
            else:
                self._input.append(self._entry(position.logprob, token_id))
                self._input_tops.append(self._tops(position))

    def add(
        self, token_ids: Sequence[int], positions: Iterable[common_pb2.PositionLogprobs]
    ) -> None:
        """More of the output."""
        for token_id, position in zip(token_ids, positions, strict=False):
            self._output.append(self._entry(position.logprob, token_id))
            self._output_tops.append(self._tops(position))

    def meta(self) -> Json:
        """What is known so far, as fields of ``meta_info``."""
        found: Json = {
            "input_token_logprobs": self._input,
            "output_token_logprobs": self._output,
        }
        if self._num_tops:
            found["input_top_logprobs"] = self._input_tops
            found["output_top_logprobs"] = self._output_tops
        return found

    def _entry(self, logprob: float | None, token_id: int) -> Entry:
        text = self._vocabulary.token_text(token_id) if self._with_text else None
        return [None if logprob is None else max(logprob, LOWEST), token_id, text]

    def _tops(self, position: common_pb2.PositionLogprobs) -> list[Entry]:
        pairs = zip(position.top_logprobs, position.top_ids, strict=True)
        return [self._entry(logprob, token_id) for logprob, token_id in pairs]
