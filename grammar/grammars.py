"""Grammars over one vocabulary, by xgrammar, which no other file here imports.

Importing it takes a second or more (it brings transformers), so this module is imported when the
first grammar comes, on the thread that compiles. Compiling and matching let go of the interpreter;
sorting the vocabulary, once, does not.

A special token, which ends a turn or begins a document, has a text as well, but is not how a model
writes that text: it may come only where the grammar names it by its id, or, for vocabularies that
do not spell bytes, where the grammar spells it out.
"""

import os
import re
from collections.abc import Sequence
from typing import Final

import numpy as np
import xgrammar

from grammar.matcher import Int32Array, num_mask_words
from grammar.vocabulary import PieceEncoding, Vocabulary
from runtime.errors import InvalidRequestError

MAX_THREADS: Final = 8
"""Of the compiler, for one grammar, and of the masks of a step; a quarter of the cores where these
are fewer."""
MIN_THREADED_ROWS: Final = 8
"""Of a step. Most masks take 3 us; waking threads takes longer than a few of them."""
_ENCODINGS: Final = {
    PieceEncoding.RAW: xgrammar.VocabType.RAW,
    PieceEncoding.BYTE_FALLBACK: xgrammar.VocabType.BYTE_FALLBACK,
    PieceEncoding.BYTE_LEVEL: xgrammar.VocabType.BYTE_LEVEL,
}
_ESCAPED: Final = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")
_PLACE: Final = re.compile(r"^\[[^\]]*\] \S+:\d+: ")  # when and where in xgrammar's own source


class Grammars:
    """Compiles for one vocabulary; any thread may call."""

    def __init__(self, vocabulary: Vocabulary, *, num_threads: int | None = None) -> None:
        """Sort the vocabulary: some 0.3 s for 130,000 tokens.

        Args:
            vocabulary: of the model.
            num_threads: see `MAX_THREADS`; None for as many as the cores allow.
        """
        info = xgrammar.TokenizerInfo(
            vocabulary.pieces,
            _ENCODINGS[vocabulary.encoding],
            vocab_size=len(vocabulary.pieces),
            stop_token_ids=[],  # a request has its own, and `Matcher` knows them
        )
        self._vocabulary = vocabulary
        if num_threads is None:
            num_threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 4))
        # Without its cache of rules, with which grammars take what they should not.
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=num_threads, cache_enabled=False
        )
        self._masks = Masks(num_threads)

    def compile(self, text: str) -> "CompiledGrammar":
        """Compile a grammar.

        Args:
            text: of `Grammar.serialize_json`, which is checked as it is read.

        Raises:
            InvalidRequestError: it is none, or of a version of xgrammar that ours does not read.
        """
        try:
            grammar = xgrammar.Grammar.deserialize_json(text)
            compiled = self._compiler.compile_grammar(grammar)
        except (RuntimeError, ValueError) as error:
            reason = _PLACE.sub("", str(error)).strip()
            raise InvalidRequestError(
                f"constraint.grammar cannot be compiled: {reason}. Give what "
                f"Grammar.serialize_json() of xgrammar gives in version "
                f"{xgrammar.get_serialization_version()}"
            ) from error
        if self._vocabulary.encoding is PieceEncoding.BYTE_LEVEL:  # where their texts tell
            return CompiledGrammar(compiled, self._masks)
        return CompiledGrammar(compiled, self._masks, self._visible_words(str(grammar)))

    def _visible_words(self, printed: str) -> Int32Array:
        """Bits of all tokens but the special ones that the grammar does not spell out."""
        words = np.full(num_mask_words(len(self._vocabulary.pieces)), -1, dtype=np.int32)
        spelled = _ESCAPED.sub(
            lambda found: chr(int(found[1] or found[2] or found[3], 16)), printed
        )
        for token_id, content in self._vocabulary.special.items():
            if not content or content not in spelled:
                words.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return words


class Masks:
    """Fills masks, those of a step on several threads; the thread that runs steps calls."""

    def __init__(self, num_threads: int) -> None:
        self._alone = xgrammar.BatchGrammarMatcher(max_threads=1)
        self._together = self._alone
        if num_threads > 1:
            self._together = xgrammar.BatchGrammarMatcher(max_threads=num_threads)

    def fill(
        self, matchers: list[xgrammar.GrammarMatcher], words: Int32Array, rows: Sequence[int]
    ) -> None:
        """Fill these rows of [R, W] words."""
        batch = self._together if len(rows) >= MIN_THREADED_ROWS else self._alone
        batch.batch_fill_next_token_bitmask(matchers, words, list(rows))


class CompiledGrammar:
    """A grammar for any number of outputs at a time."""

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        masks: Masks,
        visible_words: Int32Array | None = None,
    ) -> None:
        """Take what is compiled, what fills, and which tokens may ever come; None for all."""
        self._compiled, self._masks, self._visible_words = compiled, masks, visible_words
        self.num_bytes: int = compiled.memory_size_bytes
        if visible_words is not None:
            self.num_bytes += visible_words.nbytes

    def begin(self) -> "OutputState":
        """Return the state of an empty output."""
        return OutputState(
            xgrammar.GrammarMatcher(self._compiled), self._masks, self._visible_words
        )


class OutputState:
    """How far one output has come: a `GrammarState`."""

    def __init__(
        self, matcher: xgrammar.GrammarMatcher, masks: Masks, visible_words: Int32Array | None
    ) -> None:
        self._matcher, self._masks, self._visible_words = matcher, masks, visible_words

    def accept(self, token_id: int) -> bool:
        """See `GrammarState`."""
        return bool(self._matcher.accept_token(token_id))

    def roll_back(self, num_tokens: int) -> None:
        """See `GrammarState`."""
        self._matcher.rollback(num_tokens)

    def fill_rows(
        self, states: "Sequence[OutputState]", words: Int32Array, rows: Sequence[int]
    ) -> None:
        """See `GrammarState`."""
        self._masks.fill([state._matcher for state in states], words, rows)
        for state, row in zip(states, rows, strict=True):
            if state._visible_words is not None:
                words[row] &= state._visible_words

    @property
    def is_complete(self) -> bool:
        """See `GrammarState`."""
        return bool(self._matcher.is_completed())
