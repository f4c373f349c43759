"""Follows a grammar over bytes: what it takes, and what a model that follows it may write."""

from __future__ import annotations

import random
from collections.abc import Sequence

import xgrammar

from router.text.grammar.compile_process import grammar_of
from router.text.grammar.forms import Form

EOS = 256
FIRST_MARK = 257
"""Marks are the tokens from here on."""
_NUM_MARKS = 15
_VOCABULARY = [*(bytes([byte]) for byte in range(256)), b"", *[b"\xff"] * _NUM_MARKS]
_LIKED = frozenset(b'"}],:;012ab-.etfng< \n') | {EOS, *range(FIRST_MARK, FIRST_MARK + _NUM_MARKS)}
"""What a model writes that wants to come to an end."""


class Writer:
    """One grammar."""

    def __init__(self, form: Form) -> None:
        info = xgrammar.TokenizerInfo(
            _VOCABULARY, xgrammar.VocabType.RAW, stop_token_ids=[EOS], vocab_size=len(_VOCABULARY)
        )
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        grammar = xgrammar.Grammar.deserialize_json(grammar_of(form.format))
        self._compiled = compiler.compile_grammar(grammar)

    def takes(self, output: str | Sequence[int | str]) -> bool:
        """Whether ``output``, texts and tokens, is one as a whole."""
        matcher = xgrammar.GrammarMatcher(self._compiled)
        ids: list[int] = []
        for part in [output] if isinstance(output, str) else output:
            ids += [part] if isinstance(part, int) else part.encode()
        # Some of what a grammar says is in its masks alone.
        return all(
            token in self._allowed(matcher) and matcher.accept_token(token) for token in [*ids, EOS]
        )

    def _allowed(self, matcher: xgrammar.GrammarMatcher) -> list[int]:
        mask = xgrammar.allocate_token_bitmask(1, len(_VOCABULARY))
        matcher.fill_next_token_bitmask(mask)
        words = [word % 2**32 for word in mask[0].tolist()]
        return [t for t in range(len(_VOCABULARY)) if words[t // 32] >> t % 32 & 1]

    def write(self, rng: random.Random, most: int = 2000) -> list[int] | None:
        """Some output; None where it has no end after ``most`` tokens."""
        matcher = xgrammar.GrammarMatcher(self._compiled)
        output: list[int] = []
        while len(output) < most:
            allowed = self._allowed(matcher)
            assert allowed, f"no token may follow {output!r}"
            liked = [token for token in allowed if token in _LIKED]
            token = rng.choice(liked if liked and rng.random() < 0.9 else allowed)
            assert matcher.accept_token(token)
            if token == EOS:
                return output
            output.append(token)
        return None
