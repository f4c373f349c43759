"""A grammar without xgrammar: the sequences of tokens that may come, listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event

import numpy as np

from grammar.matcher import Int32Array, num_mask_words
from runtime.errors import InvalidRequestError

VOCAB = 70


def tokens_of(words: Int32Array) -> set[int]:
    """The tokens whose bits are set, beyond the vocabulary left out."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")
    return {int(token) for token in np.flatnonzero(bits) if token < VOCAB}


@dataclass
class ListedGrammar:
    """A `GrammarState` of whole outputs."""

    outputs: Sequence[tuple[int, ...]]
    taken: tuple[int, ...] = field(default=())

    def accept(self, token_id: int) -> bool:
        longer = (*self.taken, token_id)
        if not any(output[: len(longer)] == longer for output in self.outputs):
            return False
        self.taken = longer
        return True

    def roll_back(self, num_tokens: int) -> None:
        self.taken = self.taken[: len(self.taken) - num_tokens]

    def fill(self, words: Int32Array) -> None:
        assert len(words) >= num_mask_words(VOCAB)
        words[:] = 0
        for token_id in self.following:
            words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)

    def fill_rows(
        self, states: Sequence[ListedGrammar], words: Int32Array, rows: Sequence[int]
    ) -> None:
        for state, row in zip(states, rows, strict=True):
            state.fill(words[row])

    @property
    def is_complete(self) -> bool:
        return self.taken in self.outputs

    @property
    def following(self) -> set[int]:
        length = len(self.taken)
        return {
            output[length]
            for output in self.outputs
            if len(output) > length and output[:length] == self.taken
        }


@dataclass
class CompiledList:
    """A `Compiled` of one output; as large as it is told to be."""

    output: tuple[int, ...]
    num_bytes: int = 1

    def begin(self) -> ListedGrammar:
        return ListedGrammar([self.output])


@dataclass
class FakeCompiler:
    """A `Compiler` of texts such as "1 2 3": tokens that come in this order.

    "slow ..." waits for `may_end`; "bad" is none. Every compiled text is kept in `compiled`.
    """

    may_end: Event = field(default_factory=Event)
    compiled: list[str] = field(default_factory=list)
    num_bytes: int = 1

    def compile(self, text: str) -> CompiledList:
        self.compiled.append(text)
        if text == "bad":
            raise InvalidRequestError("constraint.grammar cannot be compiled: it is bad")
        if text.startswith("slow"):
            assert self.may_end.wait(60)
        tokens = [int(word) for word in text.removeprefix("slow").split()]
        return CompiledList(tuple(tokens), self.num_bytes)
