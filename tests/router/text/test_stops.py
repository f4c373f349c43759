"""Stop strings: the same result however the text is cut, and the right one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from router.text.stops import StopStrings

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include=include)
    text = ""
    for piece in pieces:
        result = matcher.feed(piece)
        text += result.text
        if result.stopped is not None:
            return text, result.stopped
    return text + matcher.flush(), None


def cut(text: str, points: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(point % (len(text) + 1) for point in points)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def oracle(stops: list[str], text: str) -> tuple[str, str | None]:
    """Character by character: the first position at which a stop string ends."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(STOPS, TEXT, st.lists(st.integers(0, 100)))
def test_any_cut_gives_the_oracles_result(stops: list[str], text: str, points: list[int]) -> None:
    assert run(stops, cut(text, points)) == oracle(stops, text)


@given(STOPS, TEXT, st.lists(st.integers(0, 100)))
def test_the_stop_string_can_be_kept(stops: list[str], text: str, points: list[int]) -> None:
    expected, stopped = oracle(stops, text)
    kept, _ = run(stops, cut(text, points), include=True)
    assert kept == expected + (stopped or "")


@given(STOPS, TEXT)
def test_no_more_is_held_back_than_may_become_a_stop(stops: list[str], text: str) -> None:
    matcher = StopStrings(stops)
    fed = given_out = ""
    for char in text:
        fed += char
        result = matcher.feed(char)
        given_out += result.text
        if result.stopped is not None:
            return
        held = fed[len(given_out) :]
        assert not held or any(stop.startswith(held) for stop in stops)
