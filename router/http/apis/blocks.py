"""An answer as blocks in order: thoughts, text, calls; APIs that tell each one's beginning and end.

Pure. One choice's pieces go in, news of its blocks come out; a body is made of the blocks that are
there in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from router.text.calls.events import Content
from router.text.output import Piece
from router.text.parts import CallDelta, Part
from router.text.reasoning import Reasoning


class BlockKind(Enum):
    """What a block holds."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True, kw_only=True)
class Block:
    """One part of an answer."""

    index: int
    """Among the answer's blocks, from 0."""
    kind: BlockKind
    name: str = ""
    """Of the function that a call calls."""
    call_id: str | None = None
    """Of a call, if the model wrote one."""
    texts: list[str] = field(default_factory=list)
    is_whole: bool = True
    """False: the output ended within it, by its length or within a call."""

    @property
    def text(self) -> str:
        """All of it so far; a call's are its arguments."""
        return "".join(self.texts)


class Begin(NamedTuple):
    """A block begins, still empty."""

    block: Block


class Delta(NamedTuple):
    """More text of the open block."""

    block: Block
    text: str


class End(NamedTuple):
    """The open block is over."""

    block: Block


News = Begin | Delta | End


class Blocks:
    """The blocks of one choice."""

    __slots__ = ("_open", "finish_reason", "found")

    def __init__(self) -> None:
        self.found: list[Block] = []
        self.finish_reason: str | None = None
        self._open: Block | None = None

    def is_plain_text(self, piece: Piece) -> bool:
        """Whether ``piece`` is nothing but more text of the open block."""
        is_open = self._open is not None and self._open.kind is BlockKind.TEXT
        return is_open and piece.parts is None and piece.finish_reason is None

    def add(self, piece: Piece) -> Iterator[News]:
        """What ``piece`` says; a block is over when another begins or the answer ends."""
        parts: list[Part] = [Content(piece.text)] if piece.parts is None else piece.parts
        for part in parts:
            if isinstance(part, CallDelta):
                if part.name is not None:
                    yield from self._begin(BlockKind.CALL, part.name, part.call_id)
                yield from self._more(part.arguments)
            elif part.text:
                kind = BlockKind.REASONING if isinstance(part, Reasoning) else BlockKind.TEXT
                if self._open is None or self._open.kind is not kind:
                    yield from self._begin(kind)
                yield from self._more(part.text)
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason
            yield from self._end()

    def _begin(self, kind: BlockKind, name: str = "", call_id: str | None = None) -> Iterator[News]:
        yield from self._end()
        self._open = Block(index=len(self.found), kind=kind, name=name, call_id=call_id)
        self.found.append(self._open)
        yield Begin(self._open)

    def _more(self, text: str) -> Iterator[News]:
        if text:
            assert self._open is not None
            self._open.texts.append(text)
            yield Delta(self._open, text)

    def _end(self) -> Iterator[News]:
        block, self._open = self._open, None
        if block is not None:
            within_call = self.finish_reason == "stop" and block.kind is BlockKind.CALL
            block.is_whole = self.finish_reason != "length" and not within_call
            yield End(block)
