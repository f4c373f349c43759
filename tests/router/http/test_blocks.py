"""Blocks of an answer: whatever the cuts, the same blocks, each begun and ended once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.http.apis.blocks import Begin, Block, BlockKind, Blocks, Delta, End
from router.text.calls.events import Content
from router.text.output import Piece
from router.text.parts import CallDelta, Part
from router.text.reasoning import Reasoning

TEXTS = st.text("ab\n", min_size=1, max_size=6)
TOLD = st.lists(
    st.tuples(st.just(BlockKind.REASONING), TEXTS)
    | st.tuples(st.just(BlockKind.TEXT), TEXTS)
    | st.tuples(st.just(BlockKind.CALL), st.text("{}1", max_size=6)),
    max_size=8,
)


def parts_of(told: list[tuple[BlockKind, str]]) -> list[Part]:
    """One character a part."""
    parts: list[Part] = []
    num_calls = 0
    for kind, text in told:
        if kind is BlockKind.CALL:
            parts.append(CallDelta(num_calls, f"f{num_calls}", text[:1]))
            parts += [CallDelta(num_calls, None, char) for char in text[1:]]
            num_calls += 1
        else:
            parts += [(Reasoning if kind is BlockKind.REASONING else Content)(c) for c in text]
    return parts


def pieces_of(parts: list[Part], sizes: list[int], finish_reason: str) -> list[Piece]:
    pieces = []
    while parts:
        size = sizes.pop() if sizes else 1
        some, parts = parts[:size], parts[size:]
        text = "".join(part.text for part in some if isinstance(part, Content))
        is_plain = all(isinstance(part, Content) for part in some)
        pieces.append(Piece(text, [], [], None, None if is_plain else some))
    return [*pieces, Piece("", [], [], finish_reason)]


@given(
    told=TOLD,
    sizes=st.lists(st.integers(1, 9)),
    finish_reason=st.sampled_from(["stop", "length", "tool_calls"]),
)
def test_blocks_do_not_depend_on_the_cuts(
    told: list[tuple[BlockKind, str]], sizes: list[int], finish_reason: str
) -> None:
    blocks = Blocks()
    open_block: Block | None = None
    heard: dict[int, str] = {}
    for piece in pieces_of(parts_of(told), sizes, finish_reason):
        plain = blocks.is_plain_text(piece)
        news = list(blocks.add(piece))
        assert not plain or [type(item) for item in news] == [Delta] * bool(piece.text)
        for item in news:
            match item:
                case Begin(block):
                    assert open_block is None
                    open_block, heard[block.index] = block, ""
                case Delta(block, text):
                    assert block is open_block
                    heard[block.index] += text
                case End(block):
                    assert block is open_block
                    open_block = None
    assert open_block is None
    expected: list[tuple[BlockKind, str]] = []
    for kind, text in told:
        if kind is not BlockKind.CALL and expected and expected[-1][0] is kind:
            expected[-1] = (kind, expected[-1][1] + text)
        else:
            expected.append((kind, text))
    assert [(block.kind, block.text) for block in blocks.found] == expected
    assert list(heard.values()) == [text for _, text in expected]
    names = [block.name for block in blocks.found if block.kind is BlockKind.CALL]
    assert names == [f"f{number}" for number in range(len(names))]
    *whole, last = [block.is_whole for block in blocks.found] or [True]
    assert all(whole)
    if blocks.found:
        cut = finish_reason == "length"
        within_call = finish_reason == "stop" and expected[-1][0] is BlockKind.CALL
        assert last is not (cut or within_call)
