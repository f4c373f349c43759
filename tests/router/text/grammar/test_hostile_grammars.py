"""Regular expressions and rules that read a text in ever more ways are refused, and others not."""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from grammar.schemas.schema import canonical
from router.errors import RequestError
from router.text.grammar.compilers import Compilers
from router.text.grammar.forms import (
    MAX_RIVALS,
    Form,
    by_rules,
    is_guarded,
    json_of,
    matching,
    num_rivals,
    one_of,
    sequence,
    text,
)
from router.text.tokenizer import Tokenizer

WIDE = 129_280
"""Tokens of DeepSeek-V3."""
REFUSED = {
    "rules that follow themselves": by_rules('root ::= root root | [a-z ] | ""'),
    "counts of counts": matching("((([a-z]{2,90}b){0,99}c?){0,99})x"),
    "counts of what may be nothing": matching("(([a-z]?[b-z]?){0,60}){0,60}y"),
    "a part of a sequence": sequence(text("ab"), by_rules('root ::= root root | [a-z ] | ""')),
    "a pattern of a schema": json_of(
        {"type": "string", "pattern": "^((([a-z]{2,90}b){0,99}c?){0,99})x$"}, "x"
    ),
}
TAKEN = {
    "nested stars": matching("(([a-z]*)*)*"),
    "nested counts": matching("([a-z]{0,50}){0,50}"),
    "nothing, counted": matching("([a-z]?){0,300}b"),
    "an address": matching(r"[a-z0-9._]+@[a-z]+(\.[a-z]+)+"),
    "words": matching(r"([A-Z][a-z]*( [a-z]+)*\. ?)+"),
    "a list": matching(r"([a-z ]+, )*[a-z ]+"),
    "dotted": matching(r"(\w+\.)*\w+"),
    "dotted or not": matching(r"(\w+\.?)*"),
    "anything": matching(r"[\s\S]*"),
    "sums": by_rules('root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'),
    "JSON": by_rules(
        'root ::= "[" (root ("," root)*)? "]" | "{" (pair ("," pair)*)? "}" | string | [0-9]+\n'
        'pair ::= string ":" root\nstring ::= "\\"" [^"\\\\]* "\\""'
    ),
    "a pattern of a schema": json_of({"type": "string", "pattern": "^([a-z]+-?)*$"}, "x"),
}


@pytest.fixture
async def made(model_dir: Path, tokenizer: Tokenizer) -> AsyncIterator[Compilers]:
    made = Compilers(model_dir, len(tokenizer.vocabulary.pieces))
    yield made
    await made.close()


async def answer_of(made: Compilers, form: Form) -> str:
    """Why it is refused; "": it is taken."""
    try:
        (grammar,) = await made.compile([form], param="field", is_guarded=True)
    except RequestError as error:
        return error.message
    assert "rules" in grammar
    return ""


async def test_what_grows_is_refused_by_its_field_with_what_was_measured(made: Compilers) -> None:
    assert not await answer_of(made, matching("[a-z]"))
    processes = made.process_ids
    answers = {name: await answer_of(made, form) for name, form in REFUSED.items()}
    assert {
        name: answer
        for name, answer in answers.items()
        if not re.search(r"^field is too ambiguous: after .*s of CPU.*\. Fix: ", answer)
    } == {}
    assert made.process_ids == processes  # a fork was ended, if any


async def test_what_can_be_read_in_one_way_is_taken(made: Compilers) -> None:
    answers = {name: await answer_of(made, form) for name, form in TAKEN.items()}
    assert answers == dict.fromkeys(TAKEN, "")


@pytest.mark.slow
async def test_a_vocabulary_of_129280_tokens_changes_no_verdict(
    model_dir: Path, tmp_path: Path
) -> None:
    """What is flat stays taken where each mask costs thirty times as much."""
    content = json.loads((model_dir / "tokenizer.json").read_bytes())
    vocabulary, rng = content["model"]["vocab"], random.Random(3)
    pieces = [piece for piece in vocabulary if len(piece) > 1]
    number = 1 + max(*vocabulary.values(), *(item["id"] for item in content["added_tokens"]))
    while number < WIDE:
        number += vocabulary.setdefault("".join(rng.choices(pieces, k=3)), number) == number
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    wide = Compilers(tmp_path, WIDE)
    try:
        for name in ("rules that follow themselves", "counts of counts"):
            assert "is too ambiguous" in await answer_of(wide, REFUSED[name])
        for name in ("nested stars", "a list", "dotted", "anything"):
            assert await answer_of(wide, TAKEN[name]) == ""
    finally:
        await wide.close()


async def test_whatever_is_asked_for_is_answered(made: Compilers) -> None:
    rng = random.Random(4)
    for _ in range(20):
        answer = await answer_of(made, matching(_drawn(rng, 3)))
        assert not answer or "Fix:" in answer


def _drawn(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(["a", "[a-z]", "ab", "[a-z ]", "\\w"])
    inner = [_drawn(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    joined = rng.choice(["", "|"]).join(inner)
    count = rng.choice(["*", "+", "?", "{0,30}", "{2,5}", "{1,}"])
    return f"({joined}){count}"


PATTERN = {"type": "string", "pattern": "a*"}
STRINGS: list[object] = [{"type": "string", "maxLength": 20 + n} for n in range(MAX_RIVALS + 2)]
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (text("a"), False),
        (one_of([text("a"), text("b")]), False),
        (json_of({"type": "object"}, "x"), False),
        (json_of({"properties": {"a": {"items": [PATTERN]}}}, "x"), True),
        (json_of({"patternProperties": {"a*": True}}, "x"), True),
        (json_of({"items": {"anyOf": STRINGS}}, "x"), True),
        (json_of({"items": {"anyOf": STRINGS[1:]}}, "x"), False),
        (json_of({"properties": {str(n): OPTIONAL for n in range(50)}}, "x"), False),
        (matching("a"), True),
        (by_rules('root ::= "a"'), True),
        (sequence(text("a"), matching("a")), True),
    ],
)
def test_what_may_take_long_is_guarded(form: Form, expected: Any) -> None:
    assert is_guarded(form, form) is expected
    assert is_guarded(None, form) is bool(form.schemas and expected)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (True, 0),
        ({"type": ["string", "null", "integer"]}, 0),
        ({"anyOf": [{"const": "a"}, {"const": "ab"}, {"enum": ["abc"]}]}, 0),
        ({"anyOf": [{"type": "object"}, {"type": "array"}, {"type": "object"}]}, 1),
        ({"anyOf": [{"type": "string"}, True, {"maxLength": 3}]}, 2),
        ({"anyOf": [{"anyOf": [{"type": "string"}, {"minLength": 2}]}, {"maxLength": 3}]}, 2),
        (
            {
                "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "array"}]}},
                "$ref": "#/$defs/a",
            },
            1,
        ),
        ({"properties": {"anyOf": {"type": "string"}, "enum": {}, "$defs": {}}}, 0),
        ({"enum": [{"anyOf": [1, 2]}, {"anyOf": [{"$ref": "x"}], "$defs": 3}]}, 0),
        ({"properties": {"a": {"oneOf": STRINGS}, "b": {"anyOf": STRINGS}}}, 2 * (MAX_RIVALS + 1)),
    ],
)
def test_schemas_that_are_followed_beside_others_are_counted(schema: object, expected: int) -> None:
    assert num_rivals(canonical(schema).schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"items": PATTERN},
        {"prefixItems": [True, PATTERN]},
        {"items": [PATTERN], "additionalItems": False},
        {"properties": {"pattern": PATTERN}},
        {"additionalProperties": PATTERN},
        {"unevaluatedProperties": PATTERN},
        {"propertyNames": PATTERN},
        {"anyOf": [{"type": "integer"}, PATTERN]},
        {"oneOf": [{"type": "integer"}, PATTERN]},
        {"allOf": [PATTERN]},
        {"$defs": {"a": {"items": PATTERN}}, "$ref": "#/$defs/a"},
        {"patternProperties": {"a*": {"type": "integer"}}},
        {"additionalProperties": {"items": {"prefixItems": [{"anyOf": [True, PATTERN]}]}}},
    ],
)
def test_a_pattern_is_found_wherever_a_schema_may_stand(schema: object) -> None:
    assert is_guarded(None, json_of(schema, "x"))
