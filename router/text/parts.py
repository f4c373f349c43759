"""The parts of one choice's message as they come: thoughts, text, calls.

Between these parts templates write line breaks, and models do so after them: those are no part of
the message. All other text comes out, in order.
"""

from __future__ import annotations

from typing import NamedTuple

from router.text.calls.events import Content
from router.text.reasoning import Reasoning


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


class MessageParts:
    """What was said since it was last asked for."""

    __slots__ = ("_hides_reasoning", "_line_breaks", "_parts", "after_joint", "num_calls")

    def __init__(self, *, after_joint: bool, hides_reasoning: bool) -> None:
        """``after_joint``: what comes first is the template's own if it is a line break."""
        self._hides_reasoning = hides_reasoning
        self._parts: list[Part] = []
        self._line_breaks = ""
        """At the end of the text so far: the template's if the next is of another kind."""
        self.after_joint = after_joint
        self.num_calls = 0

    def take(self) -> list[Part]:
        """The parts since the last call; neighbours of one kind are one."""
        parts, self._parts = self._parts, []
        return parts

    def joint(self) -> None:
        """One part of the message ends and another begins."""
        self._line_breaks = ""
        self.after_joint = True

    def say(self, news: Reasoning | Content) -> None:
        """More text of one kind."""
        text = news.text
        if self.after_joint:
            text = text.lstrip("\n")
            if not text:
                return
            self.after_joint = False
        body = text.rstrip("\n")
        if body:
            self._append(type(news), body)
            self._line_breaks = ""
        self._line_breaks += text[len(body) :]

    def end(self, kind: type[Reasoning] | type[Content]) -> None:
        """Nothing follows: line breaks at the end are text of this kind."""
        if self._line_breaks:
            self._append(kind, "")
            self._line_breaks = ""

    def begin_call(self, name: str, call_id: str | None) -> None:
        """A call begins; ``call_id`` is the model's own, None if it wrote none."""
        self.joint()
        self._parts.append(CallDelta(self.num_calls, name, "", call_id))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """More of the latest call."""
        last = self._parts[-1] if self._parts else None
        call = self.num_calls - 1
        if isinstance(last, CallDelta) and last.call == call:
            self._parts[-1] = last._replace(arguments=last.arguments + text)
        else:
            self._parts.append(CallDelta(call, None, text))

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
