"""One choice's output as a message: what the model thought, what it answers, which tools it calls.

Between these parts templates write line breaks, and models do so after them: those are no part of
the message. All other text comes out, in order, and the parts do not depend on how it was cut.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from router.text.calls.events import (
    Arguments,
    CallBegin,
    CallEnd,
    CallEvent,
    CallParser,
    Content,
)
from router.text.marks import Item, MarkFinder, MarkTable
from router.text.reasoning import Boundary, Reasoning, ReasoningParser


class CallDelta(NamedTuple):
    """News of one call."""

    call: int
    """Its number in the message, from 0."""
    name: str | None
    """With a call's first news."""
    arguments: str
    call_id: str | None = None
    """With a call's first news, if the model wrote one."""


Part = Reasoning | Content | CallDelta


class MessageReader:
    """Reads the output of one choice.

    A token is told before its text comes, see ``MarkFinder``.
    """

    __slots__ = (
        "_after_joint",
        "_calls",
        "_finder",
        "_hides_reasoning",
        "_line_breaks",
        "_num_calls",
        "_num_reasoning_tokens",
        "_one_call",
        "_parts",
        "_reasoning",
        "_starts",
        "is_call_open",
        "is_full",
        "visible_pieces",
    )

    def __init__(
        self,
        marks: MarkTable,
        reasoning: ReasoningParser | None,
        calls: CallParser | None,
        *,
        hides_reasoning: bool = False,
        one_call: bool = False,
    ) -> None:
        """For one choice, which owns both parsers; None: there is no such part.

        Args:
            marks: those of both parsers.
            reasoning: comes first.
            calls: reads what is no reasoning.
            hides_reasoning: it is no part of the message.
            one_call: the message is full with its first call.
        """
        self.visible_pieces = marks.visible_pieces
        self._finder = MarkFinder(marks)
        self._reasoning = reasoning
        self._calls = calls
        self._hides_reasoning = hides_reasoning
        self._one_call = one_call
        self._parts: list[Part] = []
        self._line_breaks = ""
        """At the end of the text so far: the template's if the next is of another kind."""
        self._after_joint = reasoning is not None and reasoning.is_open
        self._num_calls = 0
        self._starts: list[int] = []
        """Of the tokens that are reasoning as far as is known, their first characters' offsets."""
        self._num_reasoning_tokens = 0
        self.is_call_open = False
        self.is_full = False
        """Whether nothing can be added to the message."""

    @property
    def num_calls(self) -> int:
        """Calls so far, the open one included."""
        return self._num_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning, its marks included."""
        reasoning = self._reasoning
        if reasoning is not None and reasoning.is_open:
            return len(self._starts)
        return self._num_reasoning_tokens

    @property
    def is_over(self) -> bool:
        """Whether all that follows is text of the answer, without exception."""
        over = self._reasoning is None or self._reasoning.is_over
        return over and self._calls is None and not self._after_joint

    def tell(self, token_id: int, num_chars: int) -> None:
        """The next token is ``token_id``, and gave so many characters."""
        if self._reasoning is not None and not self._reasoning.is_over:
            self._starts.append(self._finder.num_told)
        self._finder.tell(token_id, num_chars)

    def feed(self, text: str) -> None:
        """More text of the tokens that were told."""
        if self._finder.pass_on(text):
            self._add(text)
            return
        for item in self._finder.feed(text):
            self._add(item)

    def flush(self) -> None:
        """The output is over, or ``is_over``: nothing is held back any more."""
        for item in self._finder.flush():
            self._add(item)
        if self._reasoning is not None:
            for rest in self._reasoning.flush():
                self._answer(rest)
        if self._calls is not None:
            self._take_in(self._calls.flush())
        if self._line_breaks and not self.is_full:
            is_reasoning = self._reasoning is not None and self._reasoning.is_open
            self._append(Reasoning if is_reasoning else Content, "")
            self._line_breaks = ""

    def take(self) -> list[Part]:
        """The parts since the last call; neighbours of one kind are one."""
        parts, self._parts = self._parts, []
        return parts

    def _add(self, item: Item) -> None:
        reasoning = self._reasoning
        if reasoning is None or reasoning.is_over:
            self._answer(item)
            return
        if reasoning.is_open and isinstance(item, str):
            self._say(Reasoning(item))
            return
        for news in reasoning.feed(item):
            if isinstance(news, Boundary):
                self._joint()
            elif isinstance(news, Reasoning):
                self._say(news)
            else:
                self._answer(news)
        if reasoning.is_over:
            self._end_reasoning()

    def _end_reasoning(self) -> None:
        """Count its tokens: those that began before its end; the end may have been held back."""
        if self._after_joint:  # else there was none
            self._num_reasoning_tokens = bisect_left(self._starts, self._finder.num_done)
        self._starts = []

    def _answer(self, item: Item) -> None:
        if self._calls is not None:
            self._take_in(self._calls.feed(item))
        else:
            self._say(Content(item if isinstance(item, str) else item.text))

    def _take_in(self, events: Iterator[CallEvent]) -> None:
        for event in events:
            if self.is_full:
                continue
            match event:
                case Content():
                    self._say(event)
                case CallBegin(name, call_id):
                    self._joint()
                    self._parts.append(CallDelta(self._num_calls, name, "", call_id))
                    self._num_calls += 1
                    self.is_call_open = True
                case Arguments(text):
                    self._add_arguments(text)
                case CallEnd():
                    self._joint()
                    self.is_call_open = False
                    self.is_full = self._one_call

    def _joint(self) -> None:
        """One part of the message ends and another begins."""
        self._line_breaks = ""
        self._after_joint = True

    def _say(self, news: Reasoning | Content) -> None:
        text = news.text
        if self._after_joint:
            text = text.lstrip("\n")
            if not text:
                return
            self._after_joint = False
        body = text.rstrip("\n")
        if body:
            self._append(type(news), body)
            self._line_breaks = ""
        self._line_breaks += text[len(body) :]

    def _append(self, kind: type[Reasoning] | type[Content], text: str) -> None:
        """Behind the line breaks so far."""
        if self._hides_reasoning and kind is Reasoning:
            return
        text = self._line_breaks + text
        last = self._parts[-1] if self._parts else None
        if isinstance(last, kind):
            self._parts[-1] = kind(last.text + text)
        else:
            self._parts.append(kind(text))

    def _add_arguments(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        call = self._num_calls - 1
        if isinstance(last, CallDelta) and last.call == call:
            self._parts[-1] = last._replace(arguments=last.arguments + text)
        else:
            self._parts.append(CallDelta(call, None, text))
