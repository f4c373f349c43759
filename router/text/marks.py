"""Marks in a model's output: the fixed words of its templates, such as ``</think>``. Pure.

A mark that is one token of the vocabulary is known by its id: the same letters spelled by other
tokens are text. A mark of several tokens is known by its text, and what may be its beginning is
held back until it is known not to be. Either way the result does not depend on how text is cut.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from router.text.pieces import Pieces
from router.text.tokenizer import Tokenizer


class Mark(NamedTuple):
    """One mark of the output."""

    text: str


Item = str | Mark
"""A piece of output: text that is no mark, or a mark."""


def text_of(item: Item) -> str:
    """What the model wrote."""
    return item.text if isinstance(item, Mark) else item


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkTable:
    """The marks of one model's formats in its vocabulary."""

    by_id: Mapping[int, str]
    """Those of one token."""
    spelled: tuple[str, ...] = ()
    """Those of several; none begins with another."""
    inner_by_id: Mapping[int, str] = field(default_factory=dict)
    """Control tokens that are one of the several."""
    visible_pieces: Pieces = field(default_factory=Pieces)
    """The bytes of every token, by id; those of special tokens are empty, those of marks never."""


def mark_table(tokenizer: Tokenizer, marks: Iterable[str]) -> MarkTable:
    """How ``marks`` are found in the output of a model with this tokenizer."""
    vocabulary = tokenizer.vocabulary
    by_id: dict[int, str] = {}
    spelled = []
    for mark in dict.fromkeys(marks):
        token_id = tokenizer.token_id(mark) if mark in tokenizer.control_tokens else None
        if token_id is None:
            spelled.append(mark)
        else:
            by_id[token_id] = mark
    inner = {
        token_id: token
        for token in tokenizer.control_tokens
        if any(token in mark for mark in spelled)
        and (token_id := tokenizer.token_id(token)) is not None
    }
    pieces = vocabulary.visible_pieces
    shown = by_id.keys() | inner.keys()
    if any(not pieces[token_id] for token_id in shown):
        pieces = Pieces(
            vocabulary.pieces[token_id] if token_id in shown else piece
            for token_id, piece in enumerate(pieces)
        )
    return MarkTable(by_id=by_id, spelled=tuple(spelled), inner_by_id=inner, visible_pieces=pieces)


class MarkFinder:
    """Cuts one choice's text at marks.

    Tokens are told first and their text comes later, cut in any way: what stands between may hold
    text back or end it, never change it.
    """

    __slots__ = ("_awaited", "_by_id", "_held", "_num_done", "_num_told", "_pattern", "_spelled")

    def __init__(self, table: MarkTable) -> None:
        """For one choice."""
        self._by_id = table.by_id
        self._spelled = table.spelled
        self._pattern = re.compile("|".join(map(re.escape, table.spelled)) or r"(?!)")
        self._num_told = 0
        self._num_done = 0
        """Characters that items were made of."""
        self._held = ""
        self._awaited: deque[tuple[int, Mark]] = deque()
        """Marks by id whose text did not come yet, with the offset of their first character."""

    @property
    def num_told(self) -> int:
        """Characters of all tokens told so far."""
        return self._num_told

    @property
    def num_done(self) -> int:
        """Where the latest item ends."""
        return self._num_done

    def tell(self, token_id: int, num_chars: int) -> None:
        """The next token gave ``num_chars`` characters."""
        self._num_told += num_chars
        text = self._by_id.get(token_id)
        if text is not None:
            self._awaited.append((self._num_told - len(text), Mark(text)))

    def pass_on(self, text: str) -> bool:
        """Whether ``text`` is one item, as nearly every token's; else it is to be fed."""
        if self._held or self._awaited or self._spelled or not text:
            return False
        self._num_done += len(text)
        return True

    def feed(self, text: str) -> Iterator[Item]:
        """The items that are sure now."""
        text, self._held = self._held + text, ""
        while text:
            start = self._awaited[0][0] - self._num_done if self._awaited else len(text)
            if start >= len(text):
                yield from self._spelled_in(text, may_go_on=True)
                return
            if start > 0:
                yield from self._spelled_in(text[:start], may_go_on=False)
                text = text[start:]
            mark = self._awaited[0][1]
            if len(text) < len(mark.text):
                self._held = text
                return
            self._awaited.popleft()
            yield self._done(mark)
            text = text[len(mark.text) :]

    def flush(self) -> Iterator[Item]:
        """What was held back, at the end of the output."""
        held, self._held = self._held, ""
        if held:
            yield self._done(held)

    def _spelled_in(self, text: str, *, may_go_on: bool) -> Iterator[Item]:
        begin = 0
        for found in self._pattern.finditer(text):
            if found.start() > begin:
                yield self._done(text[begin : found.start()])
            yield self._done(Mark(found.group()))
            begin = found.end()
        end = len(text) - (self._num_unfinished(text[begin:]) if may_go_on else 0)
        if end > begin:
            yield self._done(text[begin:end])
        self._held = text[end:]

    def _num_unfinished(self, text: str) -> int:
        """Length of the longest end of ``text`` with which a mark begins."""
        longest = 0
        for mark in self._spelled:
            for length in range(min(len(mark) - 1, len(text)), longest, -1):
                if text.endswith(mark[:length]):
                    longest = length
                    break
        return longest

    def _done(self, item: Item) -> Item:
        self._num_done += len(text_of(item))
        return item
