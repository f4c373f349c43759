"""Outputs of models as pieces: what a reader makes of them, however they are cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from router.text.calls.events import Content, Offered
from router.text.calls.formats import CALL_FORMATS
from router.text.marks import MarkTable
from router.text.message import MessageReader
from router.text.parts import CallDelta, Part
from router.text.reasoning import REASONING_FORMATS, Reasoning, ReasoningParser, Start

OFFERED: Offered = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "now": {},
}
THINK = REASONING_FORMATS["think"]


@dataclass
class Message:
    """What a client has in the end."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Names and arguments."""
    call_ids: list[str | None] = field(default_factory=list, compare=False)


def added_up(parts: Iterable[Part]) -> Message:
    message = Message()
    for part in parts:
        match part:
            case Reasoning(text):
                message.reasoning += text
            case Content(text):
                message.content += text
            case CallDelta(number, name, arguments, call_id):
                if name is not None:
                    assert number == len(message.calls)
                    message.calls.append([name, ""])
                    message.call_ids.append(call_id)
                message.calls[number][1] += arguments
    return message


def reader_of(
    marks: MarkTable,
    calls: str | None,
    start: Start | None = None,
    *,
    offered: Offered = OFFERED,
    **options: Any,
) -> MessageReader:
    """``calls``: the name of their format; ``start``: of the output, None: no reasoning."""
    parser = None if calls is None else partial(CALL_FORMATS[calls].new_parser, offered)
    reasoning = None if start is None else ReasoningParser(THINK, start)
    return MessageReader(marks, reasoning, parser, **options)


def all_marks(calls: str | None) -> tuple[str, ...]:
    return (*THINK.marks, *(() if calls is None else CALL_FORMATS[calls].marks))


def spelled(calls: str | None) -> MarkTable:
    """Every mark is several tokens."""
    return MarkTable(by_id={}, spelled=all_marks(calls))


def read(reader: MessageReader, pieces: Iterable[str], *, is_cut: bool = False) -> Message:
    """Pieces of text whose marks are spelled; ``is_cut``: by the output's length."""
    for piece in pieces:
        reader.tell(-1, len(piece))
        reader.feed(piece)
    reader.flush(is_cut=is_cut)
    return added_up(reader.take())


def read_tokens(
    calls: str | None, tokens: Sequence[str], lags: Sequence[int], start: Start | None = None
) -> Message:
    """Tokens of which those that are marks are known by their ids.

    ``lags``: how many characters are held back at a time.
    """
    marks = all_marks(calls)
    table = MarkTable(by_id=dict(enumerate(marks)))
    reader, text, released = reader_of(table, calls, start), "", 0
    for token, lag in zip(tokens, itertools.chain(lags, itertools.repeat(0)), strict=False):
        reader.tell(marks.index(token) if token in marks else -1, len(token))
        text += token
        end = max(released, len(text) - lag)
        reader.feed(text[released:end])
        released = end
    reader.feed(text[released:])
    reader.flush()
    return added_up(reader.take())


def cut(text: str, points: Iterable[int]) -> list[str]:
    bounds = sorted({0, len(text), *(point % (len(text) + 1) for point in points)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]
