"""Rounds of moves as bytes, which one rank tells and all read one by one.

A plan may move thousands of experts. Objects of all of them, made at once, would hold the
interpreter of every rank for a step; so they are made as their round begins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from experts.moves import Move, Round


@dataclass(frozen=True)
class ToldRounds(Sequence[Round]):
    """See the module.

    Attributes:
        encoded: a line for each round, of JSON.
    """

    encoded: bytes

    @cached_property
    def _lines(self) -> list[bytes]:
        return self.encoded.splitlines()

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> ToldRounds:
        """Encode, where that is not done."""
        if isinstance(rounds, ToldRounds):
            return rounds
        return cls(b"\n".join(json.dumps(list(map(_row_of, moves))).encode() for moves in rounds))

    @property
    def num_moves(self) -> int:
        """Of all rounds."""
        return self.encoded.count(b"[") - len(self._lines)  # each move has one, and each round

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> Round: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Round]: ...

    def __getitem__(self, index: int | slice) -> Round | Sequence[Round]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        return tuple(map(_move_of, json.loads(self._lines[index])))


def _row_of(move: Move) -> list[int]:
    return [move.layer, move.slot, move.expert, move.replaced, *map(int, move.sources)]


def _move_of(row: Sequence[int]) -> Move:
    layer, slot, expert, replaced, *sources = row
    return Move(layer=layer, slot=slot, expert=expert, replaced=replaced, sources=tuple(sources))
