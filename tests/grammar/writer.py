"""Follows a grammar over bytes: what it takes, and what a model that follows it may write."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import xgrammar

from grammar.compile_process import grammar_of
from router.text.grammar.forms import Form

EOS = 256
FIRST_MARK = 257
"""Marks are the tokens from here on."""
_NUM_MARKS = 15
_VOCABULARY = [*(bytes([byte]) for byte in range(256)), b"", *[b"\xff"] * _NUM_MARKS]
_LIKED = frozenset(b'"}],:;012ab-.etfng< \n') | {EOS, *range(FIRST_MARK, FIRST_MARK + _NUM_MARKS)}
"""What a model writes that wants to come to an end."""
_CLOSING = [EOS, *b'"}]']
PIECES = (
    *(b'",', b'"}', b'"]', b'":', b'","', b'":"', b'{"', b"[[", b"}}", b"]}", b"],", b": ", b" {"),
    *(b"ab", b"abc", b"a" * 15, b"a" * 16, b"a" * 17, b"b" * 40, b"foo", b"oo b", b"12", b"0.5"),
    *(
        b"\\n",
        b'\\"',
        b"\\u00",
        b"\\ud83d",
        b"\\ude00",
        b"\\\\\\",
        b"n\\",
        b'x"',
        b"true",
        b"null",
        b"-1",
    ),
    *(
        "\u00fc".encode(),
        "\U0001f642".encode(),
        "\U0001f642".encode()[:2],
        "\U0001f642".encode()[2:],
    ),
    *("\u00e9\u00e9".encode(), "\u4e2d\u6587".encode() * 9, b"e\xcc", b"\n\n", b"e9", b"  "),
)
"""Texts of tokens of more than one byte, as vocabularies have them."""


@cache
def _tokens(pieces: tuple[bytes, ...]) -> xgrammar.TokenizerInfo:
    texts = [*_VOCABULARY, *pieces]
    return xgrammar.TokenizerInfo(
        texts, xgrammar.VocabType.RAW, stop_token_ids=[EOS], vocab_size=len(texts)
    )


class Writer:
    """One grammar."""

    def __init__(self, form: Form, pieces: tuple[bytes, ...] = ()) -> None:
        """``pieces``: tokens behind the single bytes and the marks."""
        info = _tokens(pieces)
        self.tokens = range(len(info.decoded_vocab))
        self._texts = info.decoded_vocab
        self._mask = np.zeros((1, (len(self._texts) + 31) // 32), dtype=np.int32)
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        grammar = xgrammar.Grammar.deserialize_json(grammar_of(form.format))
        self._compiled = compiler.compile_grammar(grammar)

    def takes(self, output: str | Sequence[int | str]) -> bool:
        """Whether ``output``, texts and tokens, is one as a whole."""
        matcher = self.begin()
        ids: list[int] = []
        for part in [output] if isinstance(output, str) else output:
            ids += [part] if isinstance(part, int) else part.encode()
        # Some of what a grammar says is in its masks alone.
        return all(
            self._allows(matcher, token) and matcher.accept_token(token) for token in [*ids, EOS]
        )

    def begin(self) -> xgrammar.GrammarMatcher:
        """The state of an empty output."""
        return xgrammar.GrammarMatcher(self._compiled)

    def text(self, output: Sequence[int]) -> str:
        """Bytes that are no character reach a client as U+FFFD."""
        return b"".join(self._texts[token] for token in output).decode(errors="replace")

    def takes_next(self, matcher: xgrammar.GrammarMatcher, token: int) -> bool:
        """Whether the bytes of ``token`` are taken one by one."""
        if token == EOS:
            return bool(matcher.is_completed())
        if FIRST_MARK <= token < FIRST_MARK + _NUM_MARKS:
            return False
        text, num_taken = self._texts[token], 0
        while num_taken < len(text) and matcher.accept_token(text[num_taken]):
            num_taken += 1
        matcher.rollback(num_taken)
        return num_taken == len(text)

    def allowed(self, matcher: xgrammar.GrammarMatcher) -> list[int]:
        """The tokens that may come next."""
        matcher.fill_next_token_bitmask(self._mask)
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        return np.flatnonzero(bits[: len(self._texts)]).tolist()

    def _allows(self, matcher: xgrammar.GrammarMatcher, token: int) -> bool:
        matcher.fill_next_token_bitmask(self._mask)
        return bool(self._mask[0, token // 32] >> token % 32 & 1)

    def write(self, rng: random.Random, most: int = 2000) -> list[int] | None:
        """Some output; None where it has no end after ``most`` tokens."""
        matcher = self.begin()
        output: list[int] = []
        while len(output) < most:
            allowed = self.allowed(matcher)
            assert allowed, f"no token may follow {output!r}"
            liked = [token for token in allowed if token in _LIKED]
            closing = [token for token in _CLOSING if token in allowed]
            if closing and rng.random() < len(output) / most:
                token = closing[0]
            else:
                token = rng.choice(liked if liked and rng.random() < 0.9 else allowed)
            assert matcher.accept_token(token), (self._texts[token], self.text(output))
            if token == EOS:
                return output
            output.append(token)
        return None
