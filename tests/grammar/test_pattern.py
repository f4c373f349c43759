"""Patterns as patterns of what stands between quotation marks."""

from __future__ import annotations

import json
import random
import re

import pytest

from grammar.schemas.pattern import MAX_BYTES, check_pattern
from router.text.grammar.forms import json_of
from tests.grammar.writer import Writer

PATTERNS = [
    (r"^[ -~]+$", ["a b", "~"], ["\u00fc", ""]),
    (r"^\S+\s\S+$", ["a b"], ["ab"]),
    (r"^a|b$", ["a", "b"], ["c"]),
    (r"^[\w.+-]+@[a-z]{2,3}\.(com|de)$", ["a.b@xy.de"], ["a@b.de"]),
    (r"^.{2,3}$", ["ab", "\u00fc\U0001f642"], ["a", "abcd"]),
    (r"^\d{4}-\d\d(-\d\d)?$", ["2026-11", "2026-11-23"], ["2026"]),
    (r"^[^a]*$", ["", "bc"], ["a"]),
    (r"^(?:\U0001f642|[\u00e0-\u00ff])+?$", ["\U0001f642\u00fc"], [""]),
    (r"^\D\W$", ["a-"], ["1-", "ab"]),
    ('^say "[^"]{1,200}"$', ['say "x"', f'say "{"y" * 200}"'], ["say x", f'say "{"y" * 201}"']),
    (r'^[\\"\n]+$', ["\\", '"\n'], ["n", "\\n\\"]),
    (r"^[^a]\s$", ["\x01\t", "\\ "], ["a ", "\x01"]),
    ("^(ab?){128,129}$", ["ab" * 128, "a" * 129], ["ab" * 127, "a" * 130]),
]


@pytest.mark.parametrize(("pattern", "taken", "not_taken"), PATTERNS)
def test_a_pattern_is_followed(pattern: str, taken: list[str], not_taken: list[str]) -> None:
    writer = Writer(json_of({"type": "string", "pattern": pattern}, "x"))
    for text in taken:
        assert re.search(pattern, text)
        assert writer.takes(json.dumps(text, ensure_ascii=False))
    for text in not_taken:
        assert not re.search(pattern, text)
        assert not writer.takes(json.dumps(text, ensure_ascii=False))


def test_a_named_group_is_a_group() -> None:
    writer = Writer(json_of({"type": "string", "pattern": r"^(?<year>\d{4})\/(?<no>\d)$"}, "x"))
    assert writer.takes('"2026/1"')
    assert not writer.takes('"2026-1"')


@pytest.mark.parametrize("pattern", [pattern for pattern, _, _ in PATTERNS])
def test_what_is_written_is_json_and_fits(pattern: str) -> None:
    writer = Writer(json_of({"type": "string", "pattern": pattern}, "x"))
    rng = random.Random(5)
    for _ in range(20):
        output = writer.write(rng)
        if output is not None:
            text = json.loads(bytes(output).decode(errors="replace"))
            assert re.search(pattern, text, re.ASCII)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("[", "no regular expression"),
        ("(?!a)b", "assert not"),
        (r"(a)\1", "groupref"),
        (r"\bword\b", "word boundary"),
        ("a^b", "anchor"),
        ("(?i)a", "flags"),
        ("(?i:a)", "subpattern"),
        (r"\p{L}", "no regular expression"),
        ("[\ud800-\udbff]", "no character"),
        ("a" * (MAX_BYTES + 1), "bytes"),
        ("(a|" * 65 + "b" + ")" * 65, "levels"),
        ("(a|" * 1000 + "b" + ")" * 1000, "levels|no regular expression"),
    ],
)
def test_what_no_grammar_can_follow_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_pattern(pattern)
