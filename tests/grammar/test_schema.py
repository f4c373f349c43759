"""What a grammar takes and what is written under it is valid by the schema, and nothing else."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar.schemas.schema import canonical
from grammar.schemas.schema_errors import SchemaError, spelled
from router.text.grammar.forms import json_of
from tests.grammar.writer import Writer

NAMES = st.sampled_from(["a", "b", 'c"d', "e\n", "\u00fc"])


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, Any]:
    """Schemas of all that is followed; each has a value."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "length", "pattern"]
    kind = draw(st.sampled_from(kinds + ["object", "array", "tuple", "union"] * bool(depth)))
    inner = schemas(depth - 1)
    if kind == "enum":
        values = st.sampled_from([0, 1, "a", 'x"y', None, True, 1.5, "\u00fc\n"])
        return {"enum": draw(st.lists(values, min_size=1, max_size=3, unique_by=json.dumps))}
    if kind == "length":
        least = draw(st.integers(0, 3))
        return {"type": "string", "minLength": least, "maxLength": least + draw(st.integers(0, 3))}
    if kind == "pattern":
        patterns = ["^[a-c]{1,3}$", "a|bb", r"^\d+-\w$", "^[^x]{2}$", r"^(a[ -~]?)+$", r"^\S$"]
        return {"type": "string", "pattern": draw(st.sampled_from(patterns))}
    if kind in ("integer", "number"):
        least = draw(st.integers(-20, 20))
        bounds = {"minimum": least, "maximum": least + draw(st.integers(1, 20))}
        return {"type": kind, **(bounds if draw(st.booleans()) else {})}
    if kind == "object":
        return draw(_objects(inner))
    if kind == "array":
        least = draw(st.integers(0, 2))
        return {"type": "array", "items": draw(inner), "minItems": least, "maxItems": least + 2}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [draw(inner), draw(inner)], "items": False}
    if kind == "union":
        return {draw(st.sampled_from(["anyOf", "oneOf"])): [draw(inner), {"type": "null"}]}
    return {"type": kind, "description": "of no effect"}


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["required"] = [name for name in properties if draw(st.booleans())]
    others = draw(st.sampled_from(["absent", "none", "integers", "more"]))
    if others == "none":
        schema["additionalProperties"] = False
    elif others == "integers":
        schema["additionalProperties"] = {"type": "integer"}
    elif others == "more":
        schema["required"].append("z")
    return schema


documents = st.recursive(
    st.none() | st.booleans() | st.integers(-30, 30) | st.text('ab1-"\u00fc\n', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.just("z"), inner),
    max_leaves=6,
)


def is_valid(document: object, schema: dict[str, Any]) -> bool:
    one = copy.deepcopy(schema)
    return bool(jsonschema.Draft202012Validator(one).is_valid(document))


@settings(max_examples=60, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 2**32), closed=st.booleans())
def test_what_is_written_is_valid(schema: dict[str, Any], seed: int, closed: bool) -> None:
    closed &= '"z"' not in json.dumps(schema)  # which would be none of the properties
    writer = Writer(json_of(schema, "x", closed=closed))
    rng = random.Random(seed)
    for _ in range(3):
        output = writer.write(rng)
        if output is not None:
            # Bytes that are no character reach a client as U+FFFD.
            document = json.loads(bytes(output).decode(errors="replace"))
            assert _oneof_as_any(schema, document)


def _oneof_as_any(schema: dict[str, Any], document: object) -> bool:
    """``oneOf`` is followed as ``anyOf``: what fits two of its schemas is written, too."""
    return is_valid(document, json.loads(json.dumps(schema).replace('"oneOf"', '"anyOf"')))


@settings(max_examples=100, deadline=None)
@given(schema=schemas(), several=st.lists(documents, min_size=1, max_size=5))
def test_what_is_invalid_is_not_taken(schema: dict[str, Any], several: list[Any]) -> None:
    writer = Writer(json_of(schema, "x"))
    for document in several:
        text = json.dumps(document, ensure_ascii=False)
        if writer.takes(text):
            assert _oneof_as_any(schema, document)


def test_a_property_that_may_not_be_there_is_no_other_one_either() -> None:
    writer = Writer(json_of({"properties": {"a": False, "b": {}}}, "x"))
    assert writer.takes('{"b": 1, "c": 2}')
    assert not writer.takes('{"a": 1}')


ACCEPTED = [
    ({}, [1, {"a": [None]}, "x"]),
    (True, [1]),
    ({"type": "object"}, [{}, {"a": {"b": 1}}]),
    ({"type": ["string", "null"], "minLength": 1}, ["a", None]),
    ({"properties": {"a": {"type": "integer"}}}, [{}, {"a": 1}, {"b": "x"}]),
    ({"type": "object", "required": ["z"]}, [{"z": 1}]),
    ({"$defs": {"a/b": {"type": "integer"}}, "$ref": "#/$defs/a~1b"}, [3]),
    ({"definitions": {"N": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}, "type": "array",
      "items": {"$ref": "#/definitions/N"}}, [[], [None, [None]]]),
    ({"type": "array", "uniqueItems": False, "items": {"type": "integer"}}, [[1, 2]]),
    ({"allOf": [{"type": "integer"}]}, [1]),
    ({"type": "string", "enum": [1, "a"]}, ["a"]),
    ({"type": "string", "format": "date"}, ["2026-11-23"]),
    ({"type": "integer", "multipleOf": 5}, [5, 10]),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{"a": 1}]),
    ({"const": "x"}, ["x"]),
    ({"type": "integer", "minimum": 0.5}, [1, 7]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5, 0.01]),
    ({"type": "number", "minimum": -1.5, "maximum": 20}, [-1.5, 0, 20, 19.999, -0.25]),
    ({"type": "string", "maxLength": 3}, ['"\\\n', "\U0001f642\u00fc/"]),
    ({"type": "object", "patternProperties": {"^a+$": {"type": "null"}}}, [{"aa": None}, {}]),
    ({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 2}]}, [5, 2]),
    ({"properties": {"a": {}, "b": {}}, "minProperties": 1, "maxProperties": 2},
     [{"a": 1}, {"b": 1, "c": 2}, {"a": 1, "b": 2}]),
    ({"type": "string", "format": "date"}, ["2024-02-29"]),
    ({"properties": {"ab": {}}, "additionalProperties": {"type": "null"}},
     [{"ab": 1, "a": None, "abc": None, "b\n": None}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "several"), ACCEPTED)
def test_what_is_valid_is_taken(schema: Any, several: list[Any]) -> None:
    writer = Writer(json_of(schema, "x"))
    for document in several:
        assert is_valid(document, schema)
        assert writer.takes(json.dumps(document, ensure_ascii=False))


def test_a_closed_object_has_its_properties_alone() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object"}}}
    assert Writer(json_of(schema, "x")).takes('{"a": {"b": 1}, "c": 1}')
    assert not Writer(json_of(schema, "x", closed=True)).takes('{"a": {"b": 1}, "c": 1}')
    assert Writer(json_of(schema, "x", closed=True)).takes('{"a": {"b": 1}}')


def test_white_space_comes_to_an_end() -> None:
    writer = Writer(json_of({"type": "array", "items": {"type": "integer"}}, "x"))
    assert writer.takes("[ \n\t1,\n2]")
    assert not writer.takes("[" + " " * 1000 + "1]")


REFUSED = [
    (3, "", "is 3"),
    ({"type": "foo"}, ".type", "'foo'"),
    ({"type": []}, ".type", "list of strings"),
    ({"properties": {"a": {"type": "foo"}}}, ".properties.a.type", "'foo'"),
    ({"properties": {"a": {"not": {}}}}, ".properties.a.not", "not followed"),
    ({"items": {"uniqueItems": True}}, ".items.uniqueItems", "not followed"),
    ({"anyOf": [{}, {"if": {}}]}, ".anyOf[1].if", "not followed"),
    ({"anyOf": [{"type": "null"}], "minimum": 3}, ".anyOf", "beside minimum"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "minimum": 3}, ".minimum", "beside $ref"),
    ({"allOf": [{}, {}]}, ".allOf", "join them"),
    ({"$ref": "http://x/y"}, ".$ref", "within the schema"),
    ({"$ref": "#/$defs/a"}, ".$ref", "not there"),
    ({"$ref": "#"}, ".$ref", "back to itself"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
      "items": {"$ref": "#/$defs/a"}}, ".items.$ref", "back to itself"),
    ({"$defs": {"a": {"type": 1}}, "items": {"$ref": "#/$defs/a"}}, ".$defs.a.type", "strings"),
    ({"type": "string", "pattern": "["}, ".pattern", "no regular expression"),
    ({"type": "string", "pattern": "(?=a)"}, ".pattern", "assert"),
    ({"type": "string", "pattern": r"\p{L}"}, ".pattern", "no regular expression"),
    ({"type": "string", "pattern": "a", "minLength": 2}, ".minLength", "beside pattern"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, ".minLength", "maxLength is 2"),
    ({"type": "array", "minItems": -1}, ".minItems", "from 0"),
    ({"type": "array", "minItems": 10**9}, ".minItems", "at most"),
    ({"type": "array", "minItems": 2, "maxItems": 1}, ".minItems", "maxItems is 1"),
    ({"type": "integer", "minimum": "3"}, ".minimum", "number"),
    ({"type": "integer", "minimum": 0.5, "maximum": 0.7}, ".minimum", "beyond the maximum"),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, ".exclusiveMinimum", "beyond"),
    ({"type": "integer", "multipleOf": 10**6}, ".multipleOf", "too large"),
    ({"patternProperties": {"^a": True, "^b": False}}, ".patternProperties", "one schema"),
    ({"type": "integer", "anyOf": [{"type": "null"}]}, ".type", "beside schemas"),
    ({"type": "number", "multipleOf": 0.1}, ".multipleOf", "integers alone"),
    ({"enum": []}, ".enum", "at least one"),
    ({"type": "string", "enum": [1]}, ".enum", "no value"),
    ({"properties": []}, ".properties", "object of schemas"),
    ({"required": "a"}, ".required", "list of strings"),
    ({"properties": {}, "required": ["z"], "additionalProperties": False}, ".required", "'z'"),
    ({"prefixItems": {}}, ".prefixItems", "list of schemas"),
    ({"enum": ["x" * 300_000]}, "", "bytes"),
    ({"prefixItems": [True] * 20_000}, "", "schemas"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "place", "why"), REFUSED)
def test_what_would_not_hold_is_refused_with_its_place(schema: Any, place: str, why: str) -> None:
    with pytest.raises(SchemaError) as caught:
        canonical(schema)
    assert spelled(caught.value.path) == place
    assert why in caught.value.problem


def test_long_chains_and_names_are_followed() -> None:
    defs: dict[str, Any] = {f"n{n}": {"items": {"$ref": f"#/$defs/n{n + 1}"}} for n in range(2000)}
    defs["n2000"] = {"type": "null"}
    writer = Writer(json_of({"$ref": "#/$defs/n0", "$defs": defs}, "x"))
    assert writer.takes("[[[[]]], []]")
    name = "n" * 3000
    schema = {"properties": {name: {"type": "null"}}, "additionalProperties": {"const": 1}}
    writer = Writer(json_of(schema, "x", is_compact=True))
    assert writer.takes(f'{{"{name}":null,"{name[1:]}":1,"{name}n":1}}')
    assert not writer.takes(f'{{"{name}":1}}')
    endless = {"anyOf": [{"$ref": "#/$defs/a"}]}
    schema = {"type": "object", "propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": endless}}
    writer = Writer(json_of(schema, "x"))
    assert writer.takes("{}")
    assert not writer.takes('{"a": 1}')


def test_a_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(90):
        schema = {"items": schema}
    with pytest.raises(SchemaError, match="too deep"):
        canonical(schema)


LEFT_OUT: list[tuple[Any, list[str], str]] = [
    ({"items": {"type": "integer"}, "uniqueItems": True}, [".uniqueItems"], "[1,1]"),
    ({"type": "string", "pattern": "^(?!a)b"}, [".pattern"], '"a"'),
    ({"type": "string", "pattern": r"^\p{L}$"}, [".pattern"], '"1"'),
    ({"type": "string", "pattern": "(?=a)", "maxLength": 2}, [".pattern"], '"bc"'),
    ({"type": "string", "pattern": "^a*$", "maxLength": 2}, [".maxLength"], '"aaa"'),
    ({"type": "string", "maxLength": 1048576}, [".maxLength"], '"a"'),
    ({"type": "array", "minItems": 10**9}, [".minItems"], "[]"),
    ({"type": "string", "format": "odd"}, [".format"], '"a"'),
    ({"type": "number", "multipleOf": 0.01}, [".multipleOf"], "0.001"),
    ({"$ref": "https://example.com/a"}, [".$ref"], "1"),
    ({"properties": {"a": {"$ref": "#b"}}, "required": ["a"]}, [".properties.a.$ref"], '{"a":1}'),
    ({"type": "object", "anyOf": [{"required": ["a"]}], "required": ["b"]}, [".anyOf"], '{"b":1}'),
    ({"allOf": [{"type": "null"}, {}]}, [".allOf"], "1"),
    ({"patternProperties": {"^a(?!b)": {}}, "additionalProperties": False},
     [".patternProperties", ".additionalProperties"], '{"a":1}'),
    ({"properties": {"a": {}}, "propertyNames": {"maxLength": 1}}, [".propertyNames"], '{"bc":1}'),
    ({"type": "integer", "anyOf": [{"type": "null"}]}, [".type"], "null"),
    ({"type": "object", "allOf": [{"minProperties": 1}, {}]}, [".allOf"], "{}"),
    ({"type": "object", "$ref": "https://example.com/a"}, [".$ref"], "{}"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "places", "document"), LEFT_OUT)
def test_a_lenient_reading_tells_what_it_leaves_out(
    schema: Any, places: list[str], document: str
) -> None:
    form = json_of(schema, "x", lenient=True)
    assert form.left_out == [f"x{place}" for place in places]
    writer = Writer(form)
    assert writer.takes(document)
    if schema.get("type") == "object":
        assert not writer.takes("1"), "what can be followed is"


def test_older_drafts_are_followed() -> None:
    writer = Writer(json_of({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "x"))
    assert writer.takes("4")
    assert not writer.takes("3")
    tuples = {"items": [{"type": "integer"}, {"type": "null"}], "additionalItems": False}
    writer = Writer(json_of(tuples, "x"))
    assert writer.takes("[1, null]")
    assert not writer.takes("[null, 1]")
    assert not writer.takes("[1, null, 2]")
