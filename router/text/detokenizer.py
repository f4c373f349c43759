"""Tokens to text, one token at a time, never splitting a character. Pure.

A byte-level vocabulary gives every token a fixed string of bytes, so the text of a sequence is the
UTF-8 decoding of their concatenation: no window of earlier tokens is decoded again, and the pieces
put together are exactly what decoding the whole sequence gives. A character whose bytes are spread
over tokens comes out with its last byte; bytes that are no UTF-8 become U+FFFD.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence


class Detokenizer:
    """The growing text of one choice."""

    __slots__ = ("_held", "_pieces")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """``pieces[token_id]`` are the bytes of a token, empty for those that leave no text."""
        self._pieces = pieces
        self._held = b""
        """The beginning of a character."""

    @property
    def is_between_characters(self) -> bool:
        """Whether what comes next is text by itself."""
        return not self._held

    def feed(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty inside a character. Unknown ids have none."""
        return self.feed_all((token_id,))

    def feed_all(self, token_ids: Sequence[int]) -> str:
        """The text that all of these complete."""
        pieces = self._pieces
        try:
            if len(token_ids) == 1:  # nearly every delta
                data = pieces[token_ids[0]]
            else:
                data = b"".join([pieces[token_id] for token_id in token_ids])
        except IndexError:
            data = b"".join([pieces[i] for i in token_ids if i < len(pieces)])
        if self._held:
            data = self._held + data
        text, num_used = utf_8_decode(data, "replace")
        self._held = data[num_used:]
        return text

    def flush(self) -> str:
        """U+FFFD if the output ended inside a character, else empty."""
        held, self._held = self._held, b""
        return utf_8_decode(held, "replace", True)[0]
