"""Tokens to text, one token at a time, never splitting a character. Pure.

A byte-level vocabulary gives every token a fixed string of bytes, so the text of a sequence is the
UTF-8 decoding of their concatenation: no window of earlier tokens is decoded again, and the pieces
put together are exactly what decoding the whole sequence gives. A character whose bytes are spread
over tokens comes out with its last byte; bytes that are no UTF-8 become U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The growing text of one choice."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """``pieces[token_id]`` are the bytes of a token, empty for those that leave no text."""
        self._pieces = pieces
        self._decode = _new_decoder(errors="replace").decode

    def feed(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty inside a character. Unknown ids have none."""
        try:
            return self._decode(self._pieces[token_id])
        except IndexError:
            return ""

    def flush(self) -> str:
        """U+FFFD if the output ended inside a character, else empty."""
        return self._decode(b"", True)
