"""Bounds of strings, arrays, digits and names, at any number, over tokens of several characters."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest

from grammar.schemas.documents import document_rules
from router.text.grammar.forms import json_of
from tests.grammar.writer import EOS, PIECES, Writer

COUNTS = [0, 1, 16, 17, 127, 128, 129]
CHARS = ["a", "\u00fc", "\U0001f642", '"', "\\", "\n", "\t", "/", "\u2028", "\x7f"]
BOUNDS = ["min", "max", "both"]


def writer_of(schema: Any) -> Writer:
    return Writer(json_of(schema, "x", is_compact=True), PIECES)


def bounds_of(which: str, what: str, count: int) -> dict[str, int]:
    both = {f"min{what}": count, f"max{what}": count}
    return both if which == "both" else {f"{which}{what}": count}


def texts_of(document: Any) -> list[str]:
    """As itself, and in ASCII: pairs and other escapes count one each."""
    return [
        json.dumps(document, ensure_ascii=is_ascii, separators=(",", ":"))
        for is_ascii in (False, True)
    ]


@pytest.mark.parametrize(("count", "which"), [*itertools.product(COUNTS, BOUNDS), (1000, "max")])
def test_a_length_is_kept_whatever_its_characters_are(count: int, which: str) -> None:
    chars = random.Random(count).choices(CHARS, k=count + 1)
    string = {"type": "string", **bounds_of(which, "Length", count)}
    alone, inside = writer_of(string), writer_of({"type": "object", "additionalProperties": string})
    names = writer_of({"type": "object", "propertyNames": string})
    for number in range(max(0, count - 1), count + 2):
        value = "".join(chars[:number])
        is_valid = jsonschema.Draft202012Validator(string).is_valid(value)
        assert all(alone.takes(text) is is_valid for text in texts_of(value)), number
        assert all(inside.takes(text) is is_valid for text in texts_of({"a": value})), number
        assert all(names.takes(text) is is_valid for text in texts_of({value: 1})), number


@pytest.mark.parametrize(("count", "which"), [*itertools.product(COUNTS, BOUNDS), (1000, "max")])
def test_a_number_of_items_properties_and_digits_is_kept(count: int, which: str) -> None:
    items = {"type": "array", "items": {"type": "integer"}, **bounds_of(which, "Items", count)}
    names = {"type": "object", **bounds_of(which, "Properties", count)}
    quantity = {"min": f"{count},", "max": f"0,{count}", "both": f"{count}"}[which]
    digits = {"type": "string", "pattern": f"^\\d{{{quantity}}}$"}
    for number in range(max(0, count - 1), count + 2):
        documents = [[1] * number, {f"{index}": None for index in range(number)}, "7" * number]
        for schema, document in zip((items, names, digits), documents, strict=True):
            is_valid = jsonschema.Draft202012Validator(schema).is_valid(document)
            assert writer_of(schema).takes(texts_of(document)[0]) is is_valid, (schema, number)


def test_a_bound_of_any_size_takes_some_dozens_of_rules() -> None:
    sizes = [
        len(str(document_rules({"type": "string", "maxLength": most}, is_compact=True)))
        for most in (20, 100_000)
    ]
    assert sizes[1] < 2 * sizes[0]


STRINGS = [
    *({"maxLength": 5}, {"maxLength": 40}, {"maxLength": 129}, {"minLength": 3}, {"minLength": 30}),
    *({"minLength": 20, "maxLength": 40}, {"minLength": 40, "maxLength": 40}),
    *({"pattern": "^[ab]{3,40}\u00fc?$"}, {"pattern": '^[^a]{0,30}a"$'}, {"pattern": "^.{20,}$"}),
    {"pattern": "^([a-c]b?){2,33}$"},
]


@pytest.mark.parametrize("string", STRINGS, ids=json.dumps)
@pytest.mark.parametrize("where", ["alone", "inside"])
def test_a_mask_has_what_is_taken_and_nothing_else(string: dict[str, Any], where: str) -> None:
    """What a mask says of a token, from the time of compiling or not, holds byte for byte."""
    schema: Any = {"type": "string", **string}
    writer = writer_of(schema if where == "alone" else {"type": "array", "items": schema})
    rng, matcher = random.Random(7), writer.begin()
    for _ in range(60):
        allowed = writer.allowed(matcher)
        assert allowed == [token for token in writer.tokens if writer.takes_next(matcher, token)]
        token = rng.choice([token for token in allowed if token != EOS])
        assert matcher.accept_token(token)
        if matcher.is_completed():
            matcher = writer.begin()
