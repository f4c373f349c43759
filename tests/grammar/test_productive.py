"""Grammars that derive no text are known as such."""

from __future__ import annotations

import json

import pytest
import xgrammar

from grammar.schemas.productive import is_productive

ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
CAN_END = {"type": "object", "properties": {"a": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("ebnf", "is_one"),
    [
        ('root ::= "a" root | "b"', True),
        ('root ::= ("a" ("b" | root))*', True),
        ('root ::= x{0,3} y\nx ::= "a" x\ny ::= [a-z]+', True),
        ('root ::= ""', True),
        ("root ::= [^a]", True),
        ("root ::= root", False),
        ('root ::= "a" root', False),
        ('root ::= x{2,3}\nx ::= "a" x', False),
        ("root ::= x y\nx ::= y\ny ::= x", False),
        ("root ::= Token(5) root", False),
    ],
)
def test_a_grammar_that_cannot_end_is_not_productive(ebnf: str, is_one: bool) -> None:
    assert is_productive(xgrammar.Grammar.from_ebnf(ebnf).serialize_json()) is is_one


@pytest.mark.parametrize(("schema", "is_one"), [(ENDLESS, False), (CAN_END, True)])
def test_a_schema_that_asks_for_itself_has_no_document(schema: object, is_one: bool) -> None:
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema))
    assert is_productive(grammar.serialize_json()) is is_one


def test_another_version_of_the_written_form_is_refused() -> None:
    with pytest.raises(ValueError, match="v99"):
        is_productive('{"__VERSION__": "v99"}')
