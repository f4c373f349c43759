"""The bytes of a vocabulary's tokens, and the same as they stand within a JSON string. Pure.

Nearly every token is whole characters, so its JSON does not depend on its neighbours: it is made
once for a model and not once for every stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import orjson


class JsonPieces(dict[int, bytes | None]):
    """By token id, its text as JSON without the quotes; made when first asked for.

    None for what is no text by itself: a part of a character, a token that leaves nothing, an id
    beyond the vocabulary's.
    """

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """``pieces[token_id]`` are the bytes of a token."""
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> bytes | None:
        if not 0 <= token_id < len(self._pieces):
            return None  # and not kept: there is no end to such ids
        try:
            text = self._pieces[token_id].decode()
        except UnicodeDecodeError:
            text = ""
        said = self[token_id] = orjson.dumps(text)[1:-1] if text else None
        return said


class Pieces(list[bytes]):
    """The bytes of every token, by id."""

    __slots__ = ("json",)

    def __init__(self, pieces: Iterable[bytes] = ()) -> None:
        """Not to be changed later."""
        super().__init__(pieces)
        self.json = JsonPieces(self)
