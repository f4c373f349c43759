"""Documents of a schema in canonical form as rules. Pure.

Properties come in the order of the schema, others behind them. A name is written once where the
schema has it; those of others may come again, which no grammar can keep out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

from grammar.schemas.ebnf import Rules, literal
from grammar.schemas.formats import FORMATS
from grammar.schemas.numbers import Bound, Numbers
from grammar.schemas.strings import Strings

Schema = Mapping[str, Any] | bool
MAX_WHITESPACE = 32
"""Characters in a row between the parts of a document: models that are lost write them for ever."""
KINDS = ("string", "number", "integer", "boolean", "object", "array", "null")
KEYWORDS: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset(
        {
            *("properties", "required", "additionalProperties", "propertyNames"),
            *("patternProperties", "minProperties", "maxProperties"),
        }
    ),
}
"""That say something about values of one kind."""
_SPACE = "[ \\n\\r\\t]"


def kinds_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of its values: those that it names, or that its keywords are about; (): any."""
    kinds = schema.get("type")
    if kinds is not None:
        return (kinds,) if isinstance(kinds, str) else tuple(kinds)
    return tuple(kind for kind, names in KEYWORDS.items() if not names.isdisjoint(schema))


def document_rules(schema: Schema, *, is_compact: bool) -> str | None:
    """The grammar of the documents of ``schema``, in EBNF; None: there are none.

    ``is_compact``: without white space between their parts.
    """
    documents = _Documents(schema, is_compact=is_compact)
    root = documents.value(schema, is_inner=False)
    documents.follow_references()
    return documents.rules.text(root)


class _Documents:
    """Of one schema."""

    def __init__(self, whole: Schema, *, is_compact: bool) -> None:
        self.rules = rules = Rules()
        self._defs = whole.get("$defs", {}) if isinstance(whole, Mapping) else {}
        self._waiting: list[tuple[str, Callable[[Schema], str], Schema]] = []
        self._space = "" if is_compact else self._white_space()
        follow = ("[,}\\]:]",) if is_compact else (f"{_SPACE}*", "[,}\\]:]")
        self._strings, self._numbers = Strings(rules, follow), Numbers(rules)
        self._comma = self._spaced(literal(","))
        self._makers: Mapping[str, Callable[[Mapping[str, Any], bool], str]] = {
            "string": self._string,
            "number": self._number,
            "integer": self._integer,
            "boolean": lambda _schema, _is_inner: rules.any_of(
                [(literal("true"),), (literal("false"),)]
            ),
            "null": lambda _schema, _is_inner: literal("null"),
            "array": lambda schema, _is_inner: self._array(schema),
            "object": lambda schema, _is_inner: self._object(schema),
        }

    def value(self, schema: Schema, *, is_inner: bool = True) -> str:
        """A value of ``schema``; ``is_inner``: as part of another one."""
        if schema is False:
            return self.rules.never()
        if schema is True or not schema.keys() - {"$defs"}:
            return self._anything(is_inner=is_inner)
        if "$ref" in schema:
            return self._reference(schema["$ref"], is_inner=is_inner)
        if "enum" in schema:
            return self.rules.any_of([(literal(_written(value)),) for value in schema["enum"]])
        if "anyOf" in schema:
            return self.rules.any_of(
                [(self.value(each, is_inner=is_inner),) for each in schema["anyOf"]]
            )
        kinds = kinds_of(schema)
        return self.rules.any_of([(self._makers[kind](schema, is_inner),) for kind in kinds])

    def follow_references(self) -> None:
        """Make the rules of what references point at."""
        while self._waiting:
            name, make, schema = self._waiting.pop()
            self.rules.define(name, [(make(schema),)])

    def _white_space(self) -> str:
        """Behind it something of a document comes: most words that begin with a space do not."""
        for number in range(MAX_WHITESPACE + 1):
            more = [(_SPACE, f"space_{number - 1}")] if number else []
            self.rules.define(f"space_{number}", [(), *more], before=('["{}\\[\\],:tfn0-9\\-]',))
        return f"space_{MAX_WHITESPACE}"

    def _spaced(self, symbol: str) -> str:
        return self.rules.any_of([(self._space, symbol, self._space)])

    def _anything(self, *, is_inner: bool) -> str:
        name = "anything" if is_inner else "any_document"
        if name not in self.rules:
            self.rules.define(name, [])
            kinds = [kind for kind in KINDS if kind != "integer"]
            self.rules.define(name, [(self._makers[kind]({}, is_inner),) for kind in kinds])
        return name

    def _reference(self, ref: str, *, is_inner: bool) -> str:
        how = "inner" if is_inner else "outer"
        return self._later(ref, how, partial(self.value, is_inner=is_inner))

    def _later(self, ref: str, how: str, make: Callable[[Schema], str]) -> str:
        """The rule of what ``ref`` points at, which ``follow_references`` makes."""
        target = ref.removeprefix("#/$defs/")
        name = f"{target}_{how}"
        if name not in self.rules:
            self.rules.define(name, [])
            self._waiting.append((name, make, self._defs[target]))
        return name

    def _string(self, schema: Mapping[str, Any], is_inner: bool) -> str:
        pattern = schema.get("pattern", FORMATS.get(schema.get("format", "")))
        if pattern is not None:
            return self._strings.matching(pattern)
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        return self._strings.counted(least, most, is_inner=is_inner)

    def _integer(self, schema: Mapping[str, Any], is_inner: bool) -> str:
        least, most = integer_bounds(schema)
        if "multipleOf" in schema:
            return self._numbers.multiple(schema["multipleOf"], least, most)
        return self._numbers.integer(least, most)

    def _number(self, schema: Mapping[str, Any], is_inner: bool) -> str:
        return self._numbers.number(*number_bounds(schema))

    def _array(self, schema: Mapping[str, Any]) -> str:
        """One of ``prefixItems`` behind another, and then ``items``."""
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        first = [self.value(each) for each in schema.get("prefixItems", ())[:most]]
        other = self.value(schema.get("items", True))
        more = self.rules.any_of([(self._comma, other)])
        needed = max(0, least - len(first))
        room = None if most is None else most - len(first)
        if not first:
            return self._enclosed("[", self._listed(other, more, needed, room), "]")
        tail = self.rules.repeated(more, needed, room)
        for index in range(len(first) - 1, -1, -1):
            written = (self._comma if index else "", first[index], tail)
            tail = self.rules.any_of([written, *([()] if index >= least else [])])
        return self._enclosed("[", tail, "]")

    def _listed(self, unit: str, more: str, least: int, most: int | None) -> str:
        """So many of ``unit``, all but the first of them as ``more``."""
        if most == 0:
            return ""
        rest = self.rules.repeated(more, max(0, least - 1), None if most is None else most - 1)
        return self.rules.any_of([(unit, rest), *([] if least else [()])])

    def _enclosed(self, begin: str, inner: str, end: str) -> str:
        sequence = (literal(begin), self._space, inner, self._space if inner else "", literal(end))
        return self.rules.any_of([sequence])

    def _object(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        properties = list(schema.get("properties", {}).items())
        required = frozenset(schema.get("required", ()))
        key, value = self._further(schema)
        further = self.rules.any_of([(key, self._spaced(literal(":")), value)])
        more = self.rules.any_of([(self._comma, further)])
        pairs = []
        for name, inner in properties:
            pair = (literal(_written(name)), self._spaced(literal(":")), self.value(inner))
            pairs.append((self.rules.any_of([pair]), name in required))
        # From the last to the first: what may follow, by how many are written. Beyond ``cap`` that
        # makes no difference.
        cap = max(1, least, 0 if most is None else most + 1)
        following = []
        for count in range(min(len(pairs), cap) + 1):
            room = None if most is None else most - count
            needed = max(0, least - count)
            if room is not None and room < 0:
                following.append(self.rules.never())
            elif count:
                following.append(self.rules.repeated(more, needed, room))
            else:
                following.append(self._listed(further, more, needed, room))
        for index in range(len(pairs) - 1, -1, -1):
            following = self._with_pair(pairs[index], following[: min(index, cap) + 2])
        return self._enclosed("{", following[0], "}")

    def _with_pair(self, pair: tuple[str, bool], following: list[str]) -> list[str]:
        """What may follow where ``pair`` comes before ``following``, by how many are written."""
        symbol, is_required = pair
        found = []
        for count, skipped in enumerate(following):
            comma = self._comma if count else ""
            written = (comma, symbol, following[min(count + 1, len(following) - 1)])
            found.append(self.rules.any_of([written, *([] if is_required else [(skipped,)])]))
        return found

    def _further(self, schema: Mapping[str, Any]) -> tuple[str, str]:
        """Name and value of a property that ``properties`` does not have."""
        others = schema.get("additionalProperties", True)
        patterns = schema.get("patternProperties")
        if patterns:
            names = [(self._strings.matching(pattern),) for pattern in patterns]
            return self.rules.any_of(names), self.value(next(iter(patterns.values())))
        if "propertyNames" in schema:
            return self._key(schema["propertyNames"]), self.value(others)
        return self._strings.other_than(schema.get("properties", ())), self.value(others)

    def _key(self, names: Schema) -> str:
        """A string of ``names``, whatever else that may be of."""
        if isinstance(names, bool):
            return self.value({"type": "string"}) if names else self.rules.never()
        if "$ref" in names:
            return self._later(names["$ref"], "key", self._key)
        if "enum" in names:
            return self.value({"enum": [each for each in names["enum"] if isinstance(each, str)]})
        if "anyOf" in names:
            return self.rules.any_of([(self._key(each),) for each in names["anyOf"]])
        is_of_strings = "string" in names.get("type", "string")
        return self._string(names, True) if is_of_strings else self.rules.never()


def integer_bounds(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The least and the most that an integer may be; None: there is no end."""
    low, high = number_bounds(schema)
    least = most = None
    if low is not None:
        least = math.floor(low.value) + 1 if low.is_open else math.ceil(low.value)
    if high is not None:
        most = math.ceil(high.value) - 1 if high.is_open else math.floor(high.value)
    return least, most


def number_bounds(schema: Mapping[str, Any]) -> tuple[Bound | None, Bound | None]:
    """The ends of what a number may be; None: there is no end."""
    found: list[list[Bound]] = []
    for closed, opened in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        found.append(
            [
                Bound(value=Decimal(repr(schema[name])), is_open=name == opened)
                for name in (closed, opened)
                if name in schema
            ]
        )
    low = max(found[0], key=lambda bound: (bound.value, bound.is_open), default=None)
    high = min(found[1], key=lambda bound: (bound.value, not bound.is_open), default=None)
    return low, high


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
