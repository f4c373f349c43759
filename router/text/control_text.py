"""Keeps a client's text from being read as control tokens. Pure.

A chat template writes control tokens as text, and the tokenizer finds them in the rendered prompt.
It would find one that a client spelled as well, which could end the user's turn and begin another.
So each one in the client's values is marked inside before they are rendered, and the rendered
prompt is encoded in parts, cut at the marks: no part holds such a token whole, and the template's
own are untouched.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

REASONING_TAGS = frozenset({"<think>", "</think>"})
"""These may stand in the assistant's own messages: the history of a model that reasons has them."""


class ControlText:
    """Marks the spellings of one vocabulary's control tokens."""

    def __init__(self, tokens: Sequence[str]) -> None:
        """``tokens`` are the control tokens' texts."""
        # Two characters that no text may hold around what no client can guess.
        self._mark = f"\ufdd0{secrets.token_hex(8)}\ufdd1"
        self._all = _Spellings(tokens)
        self._but_reasoning = _Spellings([token for token in tokens if token not in REASONING_TAGS])

    def mark_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """``messages`` with all that clients write in them marked; roles are left alone."""
        return [
            {
                key: value if key == "role" else self._marked(value, self._spellings_in(message))
                for key, value in message.items()
            }
            for message in messages
        ]

    def mark(self, value: Any) -> Any:
        """``value``, a JSON value, with its strings marked; names of fields are left alone."""
        return self._marked(value, self._all)

    def parts(self, text: str) -> list[str]:
        """The rendered ``text`` cut at the marks, which are gone; encode each part by itself."""
        return text.split(self._mark)

    def _spellings_in(self, message: Mapping[str, Any]) -> _Spellings:
        return self._but_reasoning if message.get("role") == "assistant" else self._all

    def _marked(self, value: Any, spellings: _Spellings) -> Any:
        if isinstance(value, str):
            return spellings.break_up(value, self._mark)
        if isinstance(value, Mapping):
            return {key: self._marked(item, spellings) for key, item in value.items()}
        if isinstance(value, list):
            return [self._marked(item, spellings) for item in value]
        return value


class _Spellings:
    """Finds tokens in text, and a token's beginning at its end: the next text may complete it."""

    def __init__(self, tokens: Sequence[str]) -> None:
        longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
        self._tokens = tuple(longest_first)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._first_chars = frozenset(token[0] for token in longest_first)
        self._longest = max(map(len, longest_first), default=0)

    def break_up(self, text: str, mark: str) -> str:
        """``text`` with ``mark`` after the first character of each spelling."""
        cut = self._unfinished(text)
        if cut is not None:
            text = text[: cut + 1] + mark + text[cut + 1 :]
        return self._pattern.sub(lambda found: found[0][0] + mark + found[0][1:], text)

    def _unfinished(self, text: str) -> int | None:
        """Where the end of ``text`` begins to spell a token."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            if end[0] in self._first_chars and any(token.startswith(end) for token in self._tokens):
                return start
        return None
