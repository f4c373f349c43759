"""One choice's output as a message: what the model thought, what it answers, which tools it calls.

The parts do not depend on how the text was cut into pieces. What the output's length cuts within a
mark, or before it is known which tool is called, is no part of the message.

The reasoning ends with its mark, or with the call of a tool where the model leaves the mark out.
Stop strings count from there on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from router.text.calls.events import (
    Arguments,
    CallBegin,
    CallEnd,
    CallEvent,
    CallParser,
    Content,
)
from router.text.marks import Item, Mark, MarkFinder, MarkTable, text_of
from router.text.parts import MessageParts, Part
from router.text.reasoning import Boundary, Reasoning, ReasoningParser
from router.text.stops import StoppedItems, StopStrings


class MessageReader:
    """Reads the output of one choice.

    A token is told before its text comes, see ``MarkFinder``.
    """

    __slots__ = (
        "_call_start",
        "_calls",
        "_calls_end_reasoning",
        "_finder",
        "_has_all_calls",
        "_has_call_marks",
        "_marks",
        "_most_calls",
        "_new_calls",
        "_num_reasoning_tokens",
        "_parts",
        "_reasoning",
        "_starts",
        "_stopped",
        "_stops_count",
        "is_call_open",
        "visible_pieces",
    )

    def __init__(
        self,
        marks: MarkTable,
        reasoning: ReasoningParser | None,
        new_calls: Callable[[], CallParser] | None,
        *,
        hides_reasoning: bool = False,
        calls_end_reasoning: bool = True,
        most_calls: int | None = None,
    ) -> None:
        """For one choice, which owns ``reasoning``; None: there is no such part.

        Args:
            marks: those of both parsers.
            reasoning: comes first.
            new_calls: makes what reads all that is no reasoning.
            hides_reasoning: it is no part of the message.
            calls_end_reasoning: what begins as a call within the reasoning and turns out to be one
                is one; False: nothing but its mark ends the reasoning.
            most_calls: the message is full with so many.
        """
        self.visible_pieces = marks.visible_pieces
        self._marks = (*marks.by_id.values(), *marks.spelled)
        self._finder = MarkFinder(marks)
        self._reasoning = reasoning
        self._new_calls = new_calls
        self._calls = None if new_calls is None else new_calls()
        self._calls_end_reasoning = calls_end_reasoning and new_calls is not None
        self._most_calls = most_calls
        self._stopped: StoppedItems | None = None
        self._stops_count = True
        begins_open = reasoning is not None and reasoning.is_open
        self._parts = MessageParts(after_joint=begins_open, hides_reasoning=hides_reasoning)
        self._has_all_calls = self._has_call_marks = False
        self._starts: list[int] = []
        """Of the tokens that are reasoning as far as is known, their first characters' offsets."""
        self._num_reasoning_tokens = 0
        self._call_start: int | None = None
        """Within the reasoning, where a call may begin, from when on the parser reads all of it."""
        self.is_call_open = False

    def watch(self, stops: StopStrings) -> None:
        """End the message where one of ``stops`` stands behind the reasoning."""
        self._stopped = StoppedItems(stops)

    @property
    def is_full(self) -> bool:
        """Whether nothing can be added to the message."""
        return self._has_all_calls or (self._stopped is not None and self._stopped.has_stopped)

    @property
    def num_calls(self) -> int:
        """Calls so far, the open one included."""
        return self._parts.num_calls

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
        return over and self._calls is None and not self._parts.after_joint

    def tell(self, token_id: int, num_chars: int, *, stops_count: bool = True) -> None:
        """The next token is ``token_id``, and gave so many characters."""
        if self._reasoning is not None and not self._reasoning.is_over:
            self._starts.append(self._finder.num_told)
        self._finder.tell(token_id, num_chars)
        self._stops_count = stops_count

    def feed(self, text: str) -> None:
        """More text of the tokens that were told."""
        if self._finder.pass_on(text):
            self._add(text)
            return
        for item in self._finder.feed(text):
            self._add(item)

    def let_go(self) -> None:
        """The reader ``is_over``: give what it holds back, but for what stop strings do."""
        for item in self._finder.flush():
            self._add(item)
        self._end_text()

    def flush(self, *, is_cut: bool = False) -> None:
        """The output is over: nothing is held back any more.

        ``is_cut``: by its length, perhaps within a mark or a call.
        """
        for item in self._finder.flush():
            if not (is_cut and self._is_cut_mark(text_of(item))):
                self._add(item)
        reasoning = self._reasoning
        if reasoning is not None:
            for rest in reasoning.flush():
                self._answer(rest)
        if self._stopped is not None:
            for held in self._stopped.flush():
                self._read(held)
        if self._calls is not None:
            cut = self._marks if is_cut else ()
            self._read_all(
                event
                for event in self._calls.flush()
                if not (isinstance(event, Content) and event.text.lstrip().startswith(cut))
            )
        self._end_text()

    def _is_cut_mark(self, piece: str) -> bool:
        """Whether ``piece``, with which a mark begins, is more likely one than text."""
        reasons = self._reasoning is not None and not self._reasoning.is_over
        return (reasons or self._calls is not None) and (len(piece) > 1 or self._has_call_marks)

    def _end_text(self) -> None:
        is_reasoning = self._reasoning is not None and self._reasoning.is_open
        if not self._has_all_calls:
            self._parts.end(Reasoning if is_reasoning else Content)

    def take(self) -> list[Part]:
        """The parts since the last call; neighbours of one kind are one."""
        return self._parts.take()

    def _add(self, item: Item) -> None:
        reasoning = self._reasoning
        if self.is_full:
            return
        if reasoning is None or (reasoning.is_over and isinstance(item, str)):
            self._answer(item)
            return
        if reasoning.is_open and not reasoning.is_closing(item):
            self._think(item)
            return
        if reasoning.is_open:
            self._end_try()
        was_over = reasoning.is_over
        for news in reasoning.feed(item):
            if isinstance(news, Boundary):
                self._parts.joint()
            elif isinstance(news, Reasoning):
                self._parts.say(news)
            else:
                self._answer(news)
        if reasoning.is_over and not was_over:
            self._end_reasoning(self._finder.num_done)

    def _think(self, item: Item) -> None:
        """Read ``item`` of the reasoning; a mark may begin a call, which would be the end of it."""
        is_text = isinstance(item, str) or not self._calls_end_reasoning
        if self._call_start is None and is_text:
            self._parts.say(Reasoning(text_of(item)))
            return
        assert self._calls is not None
        if self._call_start is None:
            self._call_start = self._finder.num_done - len(text_of(item))
        self._has_call_marks = True
        self._read_all(self._calls.feed(item))

    def _end_try(self) -> None:
        """What was not yet known to be no call is none."""
        if self._call_start is not None:
            assert self._calls is not None
            assert self._new_calls is not None
            self._read_all(self._calls.flush())
            self._calls, self._call_start = self._new_calls(), None

    def _end_reasoning(self, offset: int) -> None:
        """Count its tokens: those that began before the ``offset`` at which it ends."""
        if self._parts.after_joint:  # else there was none
            self._num_reasoning_tokens = bisect_left(self._starts, offset)
        self._starts = []

    def _answer(self, item: Item) -> None:
        """Read ``item``, which stands behind the reasoning, up to a stop string."""
        if self._stopped is None or not self._stops_count:
            self._read(item)
        elif not self._stopped.has_stopped:
            for released in self._stopped.feed(item):
                self._read(released)

    def _read(self, item: Item) -> None:
        if self._calls is not None:
            self._has_call_marks |= isinstance(item, Mark)
            self._read_all(self._calls.feed(item))
        else:
            self._parts.say(Content(text_of(item)))

    def _read_all(self, events: Iterator[CallEvent]) -> None:
        for event in events:
            if not self._has_all_calls:
                self._take_in(event)

    def _take_in(self, event: CallEvent) -> None:
        reasoning = self._reasoning
        is_thought = reasoning is not None and reasoning.is_open
        match event:
            case Content(text) if is_thought:
                self._parts.say(Reasoning(text))
                self._call_start = self._finder.num_done  # or behind: nothing before is a call
            case Content():
                self._parts.say(event)
            case CallBegin(name, call_id):
                self._parts.begin_call(name, call_id)
                if is_thought:
                    assert reasoning is not None
                    reasoning.end()
                    self._end_reasoning(self._call_start or 0)
                self.is_call_open = True
            case Arguments(text):
                self._parts.add_arguments(text)
            case CallEnd():
                self._parts.joint()
                self.is_call_open = False
                self._has_all_calls = self._parts.num_calls == self._most_calls
