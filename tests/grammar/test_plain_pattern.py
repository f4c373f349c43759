"""Repeats that say nothing are taken out, and the texts stay the same."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grammar.schemas.plain_pattern import MAX_LEVELS, plain

TEXTS = ["".join(chars) for length in range(7) for chars in itertools.product("ab", repeat=length)]
COUNTS = ["*", "+", "?", "*?", "{0,2}", "{1,3}", "{2}", "{2,3}", "{2,}", "{0}", "{3,4}"]


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    some = st.lists(inner, min_size=1, max_size=3)
    opening = st.sampled_from(["(", "(?:"])
    return st.one_of(
        some.map("".join),
        some.map("|".join).map("({})".format),
        st.tuples(opening, inner, st.sampled_from(COUNTS)).map(lambda x: f"{x[0]}{x[1]}){x[2]}"),
    )


PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "[ab]", ".", r"\w", "", "^", "$", "[^a]", r"\x61"]),
    joined,
    max_leaves=8,
)


@given(PATTERNS)
def test_the_same_texts_are_taken(pattern: str) -> None:
    before, after = re.compile(pattern), re.compile(plain(pattern))
    for text in TEXTS:
        assert bool(before.fullmatch(text)) is bool(after.fullmatch(text)), (text, plain(pattern))


@given(PATTERNS)
def test_what_is_plain_stays_as_it_is(pattern: str) -> None:
    assert plain(plain(pattern)) == plain(pattern)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("(x*)*", "x*"),
        ("(x*)+", "x*"),
        ("(x+)*", "x*"),
        ("(x+)+", "x+"),
        ("(x?)*", "x*"),
        ("(x?)+", "x*"),
        ("(([a-z]*)*)*", "[a-z]*"),
        ("([a-z]{0,50}){0,50}", "[a-z]{0,2500}"),
        ("([a-z]?){0,300}b", "[a-z]{0,300}b"),
        ("((([a-z]{0,90}){0,99}){0,99})x", "[a-z]{0,882090}x"),
        ("(a*b*c*)*y", "(?:a|b|c)*y"),
        ("(a|a|a*)*", "a*"),
        ("(a{2,3}){4,}", "a{8,}"),
        ("(a{3}){0,2}", "(a{3}){0,2}"),
        ("([a-z]+-?)*", "(?:[a-z]-?)*"),
        (r"(_?\w+\.?)+", r"(?:_?\w\.?)+"),
        ("()*", ""),
    ],
)
def test_repeats_within_repeats(pattern: str, expected: str) -> None:
    assert plain(pattern) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        *("[a-z]+@[a-z]+(\\.[a-z]+)+", "(a|b)*c", "a{2,3}", "(\\w+\\.)*\\w+", "a|b|", ""),
        *(
            "(?=a)(b*)*",
            "(b*)*+",
            "(b*)*(",
            "(b*)*)",
            "a**",
            "(?i)(b*)*",
            "[]a](b*)*",
            "a{,3}(b*)*",
        ),
        *("(^a*)*", "(\\ba*)*", "(a)(\\1*)*", "\\", "[", "(a*)*{", "\\u12(a*)*", "a{,3}(b*)*"),
        "(" * (MAX_LEVELS + 1) + "a*" + ")*" * (MAX_LEVELS + 1),
        "(" * 20_000,
    ],
)
def test_what_is_plain_or_not_understood_is_the_same_text(pattern: str) -> None:
    assert plain(pattern) == pattern
