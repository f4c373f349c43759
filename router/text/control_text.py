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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

REASONING_TAGS = frozenset({"<think>", "</think>"})
"""These may stand in the assistant's own messages: the history of a model that reasons has them."""


WINDOW_CHARS = 64 * 2**10
"""A search in so many characters takes about a millisecond."""


class TooManySpellingsError(ValueError):
    """The texts spell more control tokens than they may."""


class _Allowance:
    """How many more spellings may be found."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._left = most

    def take(self) -> None:
        if self._left is None:
            return
        if self._left == 0:
            raise TooManySpellingsError(f"more than {self.most} control tokens are spelled")
        self._left -= 1


class ControlText:
    """Marks the spellings of one vocabulary's control tokens."""

    def __init__(self, tokens: Sequence[str]) -> None:
        """``tokens`` are the control tokens' texts."""
        # Two characters that no text may hold around what no client can guess.
        self._mark = f"\ufdd0{secrets.token_hex(8)}\ufdd1"
        self._all = _Spellings(tokens)
        self._but_reasoning = _Spellings([token for token in tokens if token not in REASONING_TAGS])

    def mark_messages(
        self, messages: Sequence[Mapping[str, Any]], *, most: int | None = None
    ) -> list[dict[str, Any]]:
        """``messages`` with all that clients write in them marked; roles are left alone.

        Raises:
            TooManySpellingsError: there are more than ``most``; None: any number may be.
        """
        allowance = _Allowance(most)
        return [
            {
                key: value
                if key == "role"
                else self._marked(value, self._spellings_in(message), allowance)
                for key, value in message.items()
            }
            for message in messages
        ]

    def mark(self, value: Any) -> Any:
        """``value``, a JSON value, with its strings marked, names of fields among them."""
        return self._marked(value, self._all, _Allowance(None))

    def parts(self, text: str) -> list[str]:
        """The rendered ``text`` cut at the marks, which are gone; encode each part by itself."""
        return text.split(self._mark)

    def _spellings_in(self, message: Mapping[str, Any]) -> _Spellings:
        return self._but_reasoning if message.get("role") == "assistant" else self._all

    def _marked(self, value: Any, spellings: _Spellings, allowance: _Allowance) -> Any:
        if isinstance(value, str):
            return spellings.break_up(value, self._mark, allowance)
        if isinstance(value, Mapping):
            return {
                self._marked(key, spellings, allowance): self._marked(item, spellings, allowance)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._marked(item, spellings, allowance) for item in value]
        return value


class _Spellings:
    """Finds tokens in text, and a token's beginning at its end: the next text may complete it.

    The time for a text grows with its length alone, whatever it spells and however many tokens
    there are.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        spellings = [token for token in tokens if token]
        self._pattern = re.compile(_pattern_of(spellings) or r"(?!)")
        self._prefixes = frozenset(t[:end] for t in spellings for end in range(1, len(t)))
        self._longest = max(map(len, spellings), default=0)

    def break_up(self, text: str, mark: str, allowance: _Allowance) -> str:
        """``text`` with ``mark`` after the first character of each spelling."""
        cut = self._unfinished(text)
        if cut is not None:
            text = text[: cut + 1] + mark + text[cut + 1 :]
        pieces = []
        done = 0
        for start in self._starts(text):
            allowance.take()
            pieces.append(text[done : start + 1])
            done = start + 1
        if not pieces:
            return text
        pieces.append(text[done:])
        return mark.join(pieces)

    def _starts(self, text: str) -> Iterator[int]:
        """Where spellings begin. In windows: the interpreter is let go of between two of them."""
        position = 0
        for window in range(WINDOW_CHARS, len(text) + WINDOW_CHARS, WINDOW_CHARS):
            # One that begins in this window may end in the next.
            for found in self._pattern.finditer(text, position, window + self._longest):
                if found.start() >= window:
                    break
                yield found.start()
                position = found.end()
            position = max(position, window)

    def _unfinished(self, text: str) -> int | None:
        """Where the end of ``text`` begins to spell a token."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._prefixes:
                return start
        return None


_Trie = dict[str, "_Trie"]
_END = ""


def _pattern_of(spellings: Sequence[str]) -> str:
    """A regular expression that shares beginnings: nothing is compared twice at one place."""
    root: _Trie = {}
    for spelling in spellings:
        node = root
        for char in spelling:
            node = node.setdefault(char, {})
        node[_END] = {}
    return _rendered(root)


def _rendered(node: _Trie) -> str:
    chain = ""
    while len(node) == 1 and _END not in node:
        (char, node) = next(iter(node.items()))
        chain += re.escape(char)
    branches = [re.escape(char) + _rendered(child) for char, child in node.items() if char]
    if not branches:
        return chain
    # Greedy: the longest spelling first.
    return chain + f"(?:{'|'.join(branches)})" + ("?" if _END in node else "")
