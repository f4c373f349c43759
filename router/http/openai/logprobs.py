"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Vocabulary
from runtime.pb import common_pb2

Json = dict[str, object]
LOWEST = -9999.0
"""JSON has no minus infinity."""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def chat_logprobs(
    vocabulary: Vocabulary,
    token_ids: Sequence[int],
    logprobs: Sequence[common_pb2.PositionLogprobs],
) -> Json:
    """``{"content": [...]}``, one entry per token."""

    def entry(token_id: int, logprob: float) -> Json:
        return {
            "token": vocabulary.token_text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(vocabulary.token_bytes(token_id)),
        }

    content = []
    for token_id, position in zip(token_ids, logprobs, strict=False):
        tops = zip(position.top_ids, position.top_logprobs, strict=True)
        content.append(
            {**entry(token_id, position.logprob), "top_logprobs": [entry(i, p) for i, p in tops]}
        )
    return {"content": content}


def prompt_logprobs(
    vocabulary: Vocabulary,
    token_ids: Sequence[int],
    positions: Sequence[common_pb2.PositionLogprobs],
) -> list[Json | None]:
    """VLLM's ``prompt_logprobs``: by token id, first the token that stands there, then the best.

    The first token of a prompt has none: null.
    """

    def entry(token_id: int, logprob: float, rank: int) -> Json:
        text = vocabulary.token_text(token_id)
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    entries: list[Json | None] = [None]
    for token_id, position in zip(token_ids[1:], positions, strict=True):
        found: Json = {str(token_id): entry(token_id, position.logprob, position.rank)}
        tops = zip(position.top_ids, position.top_logprobs, strict=True)
        for rank, (top_id, logprob) in enumerate(tops, 1):
            found.setdefault(str(top_id), entry(top_id, logprob, rank))
        entries.append(found)
    return entries


class CompletionLogprobs:
    """The parallel lists of the completions endpoint; offsets are characters of the whole text."""

    def __init__(self, vocabulary: Vocabulary, pieces: Sequence[bytes]) -> None:
        """``pieces`` is the table by which the choice's text is made."""
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(pieces)
        self._offset = 0

    def render(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs | None],
    ) -> Json:
        """The next tokens; None stands for a token that has no probability (a prompt's first)."""
        offsets, names, values, tops = [], [], [], []
        for token_id, position in zip(token_ids, logprobs, strict=False):
            name = self._vocabulary.token_name(token_id)
            names.append(name)
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.feed(token_id))
            values.append(None if position is None else _finite(position.logprob))
            tops.append(None if position is None else self._top(name, position))
        return {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, name: str, position: common_pb2.PositionLogprobs) -> dict[str, float]:
        """The best tokens by name, and the one that stands there, as evaluation tools expect."""
        found = {
            self._vocabulary.token_name(token_id): _finite(logprob)
            for token_id, logprob in zip(position.top_ids, position.top_logprobs, strict=True)
        }
        found.setdefault(name, _finite(position.logprob))
        return found


def joined(parts: Sequence[Json]) -> Json:
    """Several parts of the parallel lists as one."""
    result: dict[str, list[object]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for part in parts:
        for name, values in result.items():
            more = part[name]
            assert isinstance(more, list)
            values.extend(more)
    return dict(result)
