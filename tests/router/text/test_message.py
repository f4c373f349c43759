"""Reasoning is told from the answer, wherever the text is cut and whoever opened it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.marks import MarkTable
from router.text.output import ChoiceText, OutputOptions, Piece
from router.text.pieces import Pieces
from router.text.reasoning import REASONING_FORMATS, Start, reasoning_format
from router.text.tokenizer import Vocabulary
from runtime.sampling import FinishReason
from tests.router.text.outputs import (
    THINK,
    Message,
    added_up,
    cut,
    read,
    read_tokens,
    reader_of,
    spelled,
)

POINTS = st.lists(st.integers(0, 200), max_size=20)
CASES = [
    (Start.OPEN, "\nlet me see\n</think>\n\nIt is 4.\n", "let me see", "It is 4.\n"),
    (Start.OPEN, "no end, ", "no end, ", ""),
    (Start.OPEN, "a\n\n", "a\n\n", ""),
    (Start.OPEN, "</think>4", "", "4"),
    (Start.OPEN, "a <think> b</think>4 </think> <think>", "a <think> b", "4 </think> <think>"),
    (Start.UNDECIDED, "<think>\nhm</think>\n4", "hm", "4"),
    (Start.UNDECIDED, " \n<think>hm", "hm", ""),
    (Start.UNDECIDED, " \n4 <think>hm</think>", "", " \n4 <think>hm</think>"),
    (Start.UNDECIDED, " \n", "", " \n"),
    (Start.UNDECIDED, "\n</think>\n\n4</think>", "", "4</think>"),
    (Start.UNDECIDED, "<thin", "", "<thin"),
    (None, "<think>hm</think>4", "", "<think>hm</think>4"),
]


@pytest.mark.parametrize(("start", "text", "reasoning", "content"), CASES)
@given(POINTS)
def test_any_cut_gives_the_same_message(
    start: Start | None, text: str, reasoning: str, content: str, points: list[int]
) -> None:
    expected = Message(reasoning=reasoning, content=content)
    assert read(reader_of(spelled(None), None, start), cut(text, points)) == expected


@given(st.lists(st.sampled_from(["<think>", "</think>", "\n", "<", "a", "nk>", " b"])), POINTS)
def test_of_all_texts_only_marks_and_line_breaks_beside_them_go(
    tokens: list[str], points: list[int]
) -> None:
    text = "".join(tokens)
    for start in Start:
        whole = read(reader_of(spelled(None), None, start), [text])
        assert read(reader_of(spelled(None), None, start), cut(text, points)) == whole
        left = (whole.reasoning + whole.content).replace("\n", "")
        removed = len(text.replace("\n", "")) - len(left)
        assert removed in (0, len("</think>"), len("<think>"), len("<think></think>"))
        by_id = read_tokens(None, tokens, points, start)
        assert (by_id.reasoning + by_id.content).replace("\n", "").count("a") == text.count("a")


def test_what_the_prompt_says() -> None:
    usual, always = THINK, REASONING_FORMATS["deepseek-r1"]
    for prompt, expected in (
        ("<user>hi<assistant><think>\n", Start.OPEN),
        ("<user>hi<assistant></think>", Start.CLOSED),
        ("<assistant><think>\n\n</think>\n\n", Start.CLOSED),
    ):
        assert usual.start_of(prompt, None) is always.start_of(prompt, None) is expected
    assert usual.start_of("<assistant>", None) is Start.UNDECIDED
    assert always.start_of("<assistant>", None) is Start.OPEN
    assert usual.start_of("<a><think>so far", "so far") is Start.OPEN
    assert usual.start_of("<a><think>x</think>so far", "<think>x</think>so far") is Start.CLOSED
    assert usual.start_of("<a><think>x", "<think>x") is Start.OPEN
    assert always.start_of("<a>so far", "so far") is Start.UNDECIDED


def test_the_template_tells_whether_there_is_reasoning() -> None:
    assert reasoning_format("auto", "{{ '</think>' in content }}") is THINK
    assert reasoning_format("auto", "{{ content }}") is None
    assert reasoning_format("none", "</think>") is None
    assert reasoning_format("deepseek-r1", "") is REASONING_FORMATS["deepseek-r1"]


# Bytes are tokens; then come the marks of one token.
TOKENS = [*(bytes([byte]) for byte in range(256)), b"<think>", b"</think>", b"<tool_call>"]
TOKENS = Pieces([*TOKENS, b"</tool_call>"])
OPEN, CLOSE, CALL, CALL_END = range(256, 260)
VOCABULARY = Vocabulary(pieces=TOKENS, visible_pieces=TOKENS, special_ids=frozenset())
TABLE = MarkTable(
    by_id={OPEN: "<think>", CLOSE: "</think>", CALL: "<tool_call>", CALL_END: "</tool_call>"},
    visible_pieces=TOKENS,
)


def ids(*parts: str | int) -> list[int]:
    return [
        token_id
        for part in parts
        for token_id in ([part] if isinstance(part, int) else list(part.encode()))
    ]


def choice_of(start: Start | None, calls: str | None = None, **options) -> ChoiceText:
    return ChoiceText(VOCABULARY, OutputOptions(**options), reader_of(TABLE, calls, start))


def pieces_of(
    choice: ChoiceText, token_ids: list[int], size: int, finish: FinishReason
) -> list[Piece]:
    pieces = []
    for begin in range(0, len(token_ids), size):
        if choice.finished:
            break
        end = begin + size
        reason = finish if end >= len(token_ids) else None
        piece = choice.feed(token_ids[begin:end], (), reason)
        pieces += [] if piece is None else [piece]
    return pieces


def message_of(pieces: list[Piece]) -> Message:
    parts = [part for piece in pieces for part in piece.parts or ()]
    return Message(
        reasoning=added_up(parts).reasoning,
        content="".join(piece.text for piece in pieces),
        calls=added_up(parts).calls,
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("stops", [(), ("zzz",), (">\n\n",)])
def test_reasoning_tokens_are_those_up_to_its_end(size: int, stops: tuple[str, ...]) -> None:
    output = ids("\u00f6h", CLOSE, "\n4 <think>", 0)
    choice = choice_of(Start.OPEN, stops=stops, keep_tokens=True)
    pieces = pieces_of(choice, output, size, FinishReason.STOP)
    assert message_of(pieces) == Message(reasoning="\u00f6h", content="4 <think>")
    assert choice.num_reasoning_tokens == 4
    assert choice.num_tokens == len(output)
    assert [i for piece in pieces for i in piece.token_ids] == output
    assert pieces[-1].finish_reason == "stop"


def test_no_reasoning_no_reasoning_tokens() -> None:
    choice = choice_of(Start.UNDECIDED)
    assert message_of(pieces_of(choice, ids("\n 4", 0), 1, FinishReason.STOP)).content == "\n 4"
    assert choice.num_reasoning_tokens == 0
    cut_off = choice_of(Start.OPEN)
    pieces = pieces_of(cut_off, ids("abc"), 1, FinishReason.LENGTH)
    assert message_of(pieces) == Message(reasoning="abc")
    assert cut_off.num_reasoning_tokens == 3
    assert pieces[-1].finish_reason == "length"


def test_behind_its_reasoning_an_answer_is_read_no_more() -> None:
    choice = choice_of(Start.OPEN)
    for token_id in ids("a", CLOSE, "\n"):
        choice.feed([token_id], (), None)
    piece = choice.feed(ids("b"), (), None)
    assert piece is not None
    assert (piece.text, piece.parts) == ("b", None)
    assert choice._reader is None
    assert choice.num_reasoning_tokens == 2
    assert choice.feed(ids("\n"), (), None).text == "\n"


CALL_TEXT = '{"name": "now", "arguments": {}}'


def test_an_output_that_nothing_can_follow_ends_with_the_text_of_its_last_token() -> None:
    pieces = pieces_of(choice_of(Start.UNDECIDED), ids('{"a": 1}'), 1, FinishReason.COMPLETE)
    assert message_of(pieces).content == '{"a": 1}'
    assert pieces[-1].finish_reason == "stop"
    call = pieces_of(
        choice_of(None, "hermes"), ids(CALL, CALL_TEXT, CALL_END), 1, FinishReason.COMPLETE
    )
    assert len(message_of(call).calls) == 1
    assert call[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_why_a_message_with_calls_ended(size: int) -> None:
    output = ids(CALL, CALL_TEXT, CALL_END, 0)
    reasons = {}
    for name, tokens, finish, options in (
        ("stop token", output, FinishReason.STOP, {}),
        ("no closing mark", [*output[:-2], 0], FinishReason.STOP, {}),
        ("cut", output[:-4], FinishReason.LENGTH, {}),
        ("stop string behind", [*output[:-1], *ids("END")], FinishReason.STOP, {"stops": ("END",)}),
        ("stop string within", output, FinishReason.STOP, {"stops": ("}",)}),
        ("no call", ids("plain", 0), FinishReason.STOP, {}),
    ):
        pieces = pieces_of(choice_of(None, "hermes", **options), tokens, size, finish)
        reasons[name] = pieces[-1].finish_reason
        assert bool(message_of(pieces).calls) is (name != "no call")
    assert reasons == {
        "stop token": "tool_calls",
        "no closing mark": "tool_calls",
        "cut": "length",
        "stop string behind": "tool_calls",
        "stop string within": "stop",
        "no call": "stop",
    }


def test_a_message_that_may_have_one_call_ends_with_it() -> None:
    output = ids(CALL, CALL_TEXT, CALL_END, "\n", CALL, CALL_TEXT, CALL_END, 0)
    for size in (1, 1000):
        reader = reader_of(TABLE, "hermes", None, most_calls=1)
        choice = ChoiceText(VOCABULARY, OutputOptions(keep_tokens=True), reader)
        pieces = pieces_of(choice, output, size, FinishReason.STOP)
        assert message_of(pieces).calls == [["now", "{}"]]
        assert pieces[-1].finish_reason == "tool_calls"
        assert choice.num_tokens == 1 + len(CALL_TEXT)
