"""The border behind the reasoning holds for stops, calls and ends, whatever a model leaves out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.calls.formats import CALL_FORMATS
from router.text.marks import Mark, text_of
from router.text.message import MessageReader
from router.text.reasoning import Start
from router.text.stops import StoppedItems, StopStrings
from tests.router.text.outputs import Message, all_marks, cut, read, read_tokens, reader_of, spelled
from tests.router.text.test_calls import WEATHER, loaded, written
from tests.router.text.test_stops import oracle

MARKED = sorted(name for name, fmt in CALL_FORMATS.items() if fmt.shape.is_marked)
"""Formats of calls that begin with a mark; others are told by an answer's first character."""
POINTS = st.lists(st.integers(0, 200), max_size=20)
WORDS = st.lists(st.sampled_from(["a", "b", "ab", "<", " ", "\n", ">", "</think>", "<think>"]))
STOPS = st.lists(st.sampled_from(["ab", "b<", "\n", " a", "</", "</think>", "a\nb"]), max_size=3)
CALLS = [("get_weather", WEATHER), ("now", {})]


def watched(reader: MessageReader, stops: list[str], *, include: bool = False) -> MessageReader:
    reader.watch(StopStrings(stops, include=include))
    return reader


def border_of(text: str, start: Start) -> int:
    """Where the reasoning of ``text`` has ended."""
    opened = start is Start.OPEN
    if start is Start.UNDECIDED:
        opened = text.lstrip().startswith(("<think>", "</think>"))
    if not opened:
        return 0
    end = text.find("</think>")
    return len(text) if end < 0 else end + len("</think>")


@given(WORDS, STOPS, POINTS, st.booleans(), st.sampled_from(Start))
def test_stops_count_behind_the_border_wherever_the_text_is_cut(
    words: list[str], stops: list[str], points: list[int], include: bool, start: Start
) -> None:
    text = "".join(words)
    border = border_of(text, start)
    answer, stopped = oracle(stops, text[border:])
    if include:
        answer += stopped or ""
    expected = read(reader_of(spelled(None), None, start), [text[:border] + answer])
    reader = watched(reader_of(spelled(None), None, start), stops, include=include)
    assert read(reader, cut(text, points)) == expected
    assert reader.is_full is (stopped is not None)


@given(
    st.lists(st.sampled_from(["a", "bc", Mark("<m>"), "<", Mark("</m>"), "m>"])),
    st.lists(st.sampled_from(["<m>", "m>a", "a<", "bc", ">", "</m"]), max_size=3),
    st.booleans(),
)
def test_marks_come_out_whole_or_are_cut_by_a_stop(
    items: list[str | Mark], stops: list[str], include: bool
) -> None:
    expected, stopped = oracle(stops, "".join(map(text_of, items)))
    watch = StoppedItems(StopStrings(stops, include=include))
    found: list[str | Mark] = []
    for item in items:
        if not watch.has_stopped:
            found += watch.feed(item)
    found += [] if watch.has_stopped else watch.flush()
    expected += (stopped or "") if include else ""
    assert "".join(map(text_of, found)) == expected
    marks = [item for item in items if isinstance(item, Mark)]
    left = [item for item in found if isinstance(item, Mark)]
    assert left == marks[: len(left)]
    if stopped is None:
        assert left == marks


@pytest.mark.parametrize("name", MARKED)
@given(POINTS)
def test_a_call_ends_reasoning_that_nothing_else_ends(name: str, points: list[int]) -> None:
    calls = written(name, CALLS)
    for thoughts, behind in (("hm\n", ""), ("", ""), ("hm", "</think>"), ("a\n<think>", "\n")):
        text = "".join([thoughts, *calls, behind])
        found = read(reader_of(spelled(name), name, Start.OPEN), cut(text, points))
        assert (found.reasoning, found.content) == (thoughts.rstrip("\n"), "")
        assert loaded(found) == CALLS
        tokens = [thoughts, *calls, *([behind] if behind else [])]
        assert read_tokens(name, tokens, [], Start.OPEN) == found


@pytest.mark.parametrize("name", MARKED)
@given(POINTS)
def test_what_is_no_call_does_not_end_it(name: str, points: list[int]) -> None:
    unknown = "".join(written(name, [("nobody", {})]))
    begin = written(name, CALLS)[0]
    for thoughts in (f"hm {unknown} so", f"see {begin} or", begin, unknown + "\n\nso"):
        for call in ("", "".join(written(name, CALLS))):
            text = f"{thoughts}</think>4{call}"
            found = read(reader_of(spelled(name), name, Start.OPEN), cut(text, points))
            assert (found.reasoning, found.content) == (thoughts, "4")
            assert loaded(found) == (CALLS if call else [])
        found = read(reader_of(spelled(name), name, Start.OPEN), cut(thoughts, points))
        assert (found.reasoning, found.content, found.calls) == (thoughts, "", [])


@pytest.mark.parametrize("name", MARKED)
def test_where_a_form_holds_behind_the_mark_only_the_mark_is_the_border(name: str) -> None:
    call = "".join(written(name, CALLS))
    reader = reader_of(spelled(name), name, Start.OPEN, calls_end_reasoning=False)
    found = read(reader, [f"hm{call}</think>{call}"])
    assert (found.reasoning, found.content) == (f"hm{call}", "")
    assert loaded(found) == CALLS


@pytest.mark.parametrize("name", MARKED)
@given(POINTS)
def test_marks_that_a_length_cuts_are_nobodys_content(name: str, points: list[int]) -> None:
    head = "hm</think>I look.\n"
    text = head + "".join(written(name, CALLS))
    for end in range(len(text)):
        reader = reader_of(spelled(name), name, Start.OPEN)
        found = read(reader, cut(text[:end], points), is_cut=True)
        assert "hm".startswith(found.reasoning.removesuffix("<"))
        assert "I look.\n".startswith(found.content.removesuffix("<"))
        if end > len(head) + 1:
            assert found.content.strip() == "I look."


def test_text_that_a_length_cuts_stays() -> None:
    for calls, text, content in (
        ("hermes", "if a <", "if a <"),
        (None, "if a </think", "if a </think"),
        ("llama3-json", '{"answer": 4, "wh', '{"answer": 4, "wh'),
        ("hermes", "<tool_call>no</tool_call>, <to", "<tool_call>no</tool_call>, "),
    ):
        start = Start.CLOSED if calls is None else None
        found = read(reader_of(spelled(calls), calls, start), [text], is_cut=True)
        assert found == Message(content=content)
        assert all_marks(calls)
