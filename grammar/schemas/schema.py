"""JSON schemas in the form that ``documents`` makes rules of. Pure.

Here a schema is walked through once: what can be said otherwise is rewritten, and what no grammar
follows is refused with its place, or left out and named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

import orjson

from grammar.schemas.documents import KINDS
from grammar.schemas.keywords import Keywords
from grammar.schemas.pattern import check_pattern
from grammar.schemas.schema_errors import Path, SchemaError, shown

MAX_BYTES = 256 * 2**10
MAX_DEPTH = 64
"""Names and numbers on the way to a schema, from the whole one or the reference to it."""
MAX_SCHEMAS = 10_000
"""Schemas within one schema."""
_COMBINATORS = ("anyOf", "oneOf", "allOf")
_NEVER = {
    **dict.fromkeys(("not", "if", "then", "else", "contains")),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies")),
    **dict.fromkeys(("unevaluatedItems", "$dynamicRef", "$recursiveRef")),
    "minContains": 0,
    "uniqueItems": False,
}
"""Keywords that no grammar follows here, each with the value that says nothing."""
_CONSTRAINTS = frozenset(
    {
        *("type", "enum", "const", "$ref", "properties", "required", "additionalProperties"),
        *("unevaluatedProperties", "propertyNames", "patternProperties", "items", "prefixItems"),
        *("additionalItems", "pattern", "format", "minimum", "maximum", "exclusiveMinimum"),
        *("exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems"),
        *("minProperties", "maxProperties"),
        *_COMBINATORS,
        *_NEVER,
    }
)
"""All else is an annotation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canonical:
    """A schema that means what it says."""

    schema: dict[str, Any] | bool
    left_out: tuple[Path, ...]
    """Keywords that are not followed."""


def canonical(schema: object, *, closed: bool = False, lenient: bool = False) -> Canonical:
    """``schema`` rewritten.

    Args:
        schema: of JSON Schema, with references into itself alone.
        closed: an object has no property beside its ``properties``, where it has some, unless its
            schema says otherwise.
        lenient: leave out what cannot be followed, instead of refusing it.

    Raises:
        SchemaError: says what is wrong, and where.
    """
    try:
        num_bytes = len(orjson.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError((), f"cannot be read: {error}") from error
    if num_bytes > MAX_BYTES:
        raise SchemaError((), f"has {num_bytes} bytes. Fix: send at most {MAX_BYTES}")
    walk = _Walk(schema, closed=closed, lenient=lenient)
    result = walk.schema(schema, ())
    walk.follow_references()
    if walk.defs and isinstance(result, dict):
        result = {**result, "$defs": walk.defs}
    return Canonical(schema=result, left_out=tuple(walk.left_out))


def objects_of(found: Canonical) -> Canonical:
    """The objects among the documents of ``found``, by one schema or an ``anyOf`` of such.

    None of these is a reference or a union. It is one schema where ``found`` was no union either.

    Raises:
        SchemaError: there are none.
    """
    whole = found.schema
    defs = whole.get("$defs", {}) if isinstance(whole, dict) else {}
    waiting, known, objects = [whole], set[str](), list[dict[str, Any]]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, bool):
            objects += [{"type": "object"}] if node else []
        elif "$ref" in node:
            waiting += [] if node["$ref"] in known else [defs[node["$ref"].split("/")[-1]]]
            known.add(node["$ref"])
        elif "anyOf" in node:
            waiting += reversed(node["anyOf"])
        elif "enum" in node:
            objects += [_only(value) for value in node["enum"] if isinstance(value, dict)]
        elif "object" in (node.get("type", "object"), *node.get("type", ())):
            objects.append({**node, "type": "object"})
    if not objects:
        has_type = isinstance(whole, dict) and "type" in whole
        raise SchemaError(("type",) if has_type else (), "lets in no object. Fix: send object")
    is_plain = isinstance(whole, bool) or whole.keys().isdisjoint(("$ref", "anyOf", "enum"))
    schema = objects[0] if is_plain else {"anyOf": objects}
    return replace(found, schema={**schema, "$defs": defs} if defs else schema)


def _only(value: dict[str, Any]) -> dict[str, Any]:
    """The schema of the object ``value`` alone."""
    properties = {name: {"enum": [each]} for name, each in value.items()}
    fields = {"properties": properties, "required": list(value)} if value else {}
    return {"type": "object", **fields, "additionalProperties": False}


class _Walk:
    """One walk through one schema."""

    def __init__(self, root: object, *, closed: bool, lenient: bool) -> None:
        self.defs: dict[str, Any] = {}
        self.left_out: list[Path] = []
        self._root, self._closed, self._lenient = root, closed, lenient
        self._keywords = Keywords(self._leave_out, self.left_out.append)
        self._names: dict[str, str] = {}
        self._waiting: list[tuple[str, object, Path]] = []
        self._num_schemas = 0

    def schema(self, node: object, path: Path) -> dict[str, Any] | bool:
        """``node``, which stands at ``path``."""
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise SchemaError((), f"holds more than {MAX_SCHEMAS} schemas. Fix: send fewer")
        if len(path) > MAX_DEPTH:
            raise SchemaError(path[:8], f"is nested too deep. Fix: at most {MAX_DEPTH} levels")
        if isinstance(node, bool):
            return {} if node else False
        if not isinstance(node, dict):
            raise SchemaError(path, f"is {shown(node)}. Fix: send an object or a boolean")
        node = self._without_never(node, path)
        for name, read in (("$ref", self._ref), ("const", self._enum), ("enum", self._enum)):
            if name in node:
                self._alone(node, path, name, {"type"} if read == self._enum else set())
                return read(node, path)
        for name in _COMBINATORS:
            if name in node and node.keys() <= {name, "type"}:
                return self._combined(node, path, name)
            if name in node:
                other = next(other for other in node if other not in (name, "type"))
                problem = f"is not followed beside {other}. Fix: move that into the schemas there"
                self._leave_out((*path, name), problem)
                node.pop(name)
        return self._plain(node, path)

    def follow_references(self) -> None:
        """Walk through what references point at."""
        while self._waiting:
            name, node, origin = self._waiting.pop()
            self.defs[name] = self.schema(node, origin)

    def _leave_out(self, path: Path, problem: str) -> None:
        if not self._lenient:
            raise SchemaError(path, problem)
        self.left_out.append(path)

    def _without_never(self, node: dict[str, Any], path: Path) -> dict[str, Any]:
        node = {name: value for name, value in node.items() if name in _CONSTRAINTS}
        for name in [name for name in node if name in _NEVER]:
            value = node.pop(name)
            if value != _NEVER[name] or isinstance(value, bool) != isinstance(_NEVER[name], bool):
                self._leave_out((*path, name), "is not followed by this server. Fix: leave it out")
        ref = node.get("$ref", "#")
        if isinstance(ref, str) and ref != "#" and not ref.startswith("#/"):
            problem = f"is {shown(ref)}. Fix: send a reference within the schema, as #/$defs/NAME"
            self._leave_out((*path, "$ref"), problem)
            node.pop("$ref")
        return node

    def _alone(self, node: dict[str, Any], path: Path, name: str, others: set[str]) -> None:
        """Refuse keywords beside ``name`` that would not be followed."""
        for other in node:
            if other != name and other not in others:
                problem = f"is not followed beside {name}. Fix: move it into the schemas there"
                self._leave_out((*path, other), problem)

    def _ref(self, node: dict[str, Any], path: Path) -> dict[str, Any]:
        ref, place = node["$ref"], (*path, "$ref")
        if not isinstance(ref, str):
            raise SchemaError(place, f"is {shown(ref)}. Fix: send a string")
        if ref not in self._names:
            target, origin = self._target(ref, place)
            self._names[ref] = f"d{len(self._names)}"
            self._waiting.append((self._names[ref], target, origin))
        return {"$ref": f"#/$defs/{self._names[ref]}"}

    def _target(self, ref: str, place: Path) -> tuple[object, Path]:
        """What ``ref`` points at, at the end of a chain of mere references."""
        seen: set[str] = set()
        while True:
            if ref in seen:
                raise SchemaError(place, f"{ref!r} leads back to itself. Fix: let it end somewhere")
            seen.add(ref)
            node: object = self._root
            origin: Path = ()
            for part in ref.split("/")[1:]:
                part = unquote(part).replace("~1", "/").replace("~0", "~")
                node, origin = _step(node, origin, part, place, ref)
            following = node.get("$ref") if isinstance(node, dict) else None
            if not isinstance(following, str) or not (following + "/").startswith("#/"):
                return node, origin
            ref = following

    def _enum(self, node: dict[str, Any], path: Path) -> dict[str, Any]:
        name = "const" if "const" in node else "enum"
        values = [node["const"]] if name == "const" else node["enum"]
        if not isinstance(values, list) or not values:
            raise SchemaError((*path, name), "must be a list of at least one value")
        kinds = self._types(node, path)
        fitting = [value for value in values if not kinds or _is_of(value, kinds)]
        if not fitting:
            raise SchemaError((*path, name), f"has no value of the type {node['type']!r}")
        return {"enum": fitting}

    def _combined(self, node: dict[str, Any], path: Path, name: str) -> dict[str, Any] | bool:
        branches = node[name]
        if not isinstance(branches, list) or not branches:
            raise SchemaError((*path, name), "must be a list of at least one schema")
        if name != "allOf" or len(branches) == 1:
            branches = self._typed(branches, node, path)
            found = [self.schema(b, (*path, name, i)) for i, b in enumerate(branches)]
            return found[0] if len(found) == 1 else {"anyOf": found}
        self._leave_out((*path, name), "of several schemas is not followed. Fix: join them in one")
        return self._plain({"type": node["type"]} if "type" in node else {}, path)

    def _typed(self, branches: list[Any], node: dict[str, Any], path: Path) -> list[Any]:
        """``branches`` with the type that stands beside them."""
        if "type" not in node:
            return branches
        self._types(node, path)
        typed = []
        for branch in branches:
            is_plain = isinstance(branch, dict) and branch.keys().isdisjoint(
                ("$ref", "const", "enum", *_COMBINATORS)
            )
            if not is_plain or branch.get("type", node["type"]) != node["type"]:
                problem = "is not followed beside schemas of others. Fix: move it into them"
                self._leave_out((*path, "type"), problem)
                return branches
            typed.append({**branch, "type": node["type"]})
        return typed

    def _types(self, node: dict[str, Any], path: Path) -> tuple[str, ...]:
        kinds = node.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or ("type" in node and not kinds):
            raise SchemaError((*path, "type"), "must be a string or a list of strings")
        for kind in kinds:
            if kind not in KINDS:
                fix = f"Fix: send one of {', '.join(KINDS)}"
                raise SchemaError((*path, "type"), f"is {shown(kind)}. {fix}")
        return tuple(kinds)

    def _plain(self, node: dict[str, Any], path: Path) -> dict[str, Any]:
        kinds = self._types(node, path)
        result: dict[str, Any] = {"type": node["type"]} if kinds else {}
        counts = self._keywords.counts(node, path)
        result |= self._keywords.numbers(node, path, kinds)
        result |= self._keywords.strings(node, path, counts)
        result |= counts
        self._array(node, path, result)
        self._object(node, path, result)
        return result

    def _array(self, node: dict[str, Any], path: Path, result: dict[str, Any]) -> None:
        items, first, place = node.get("items"), node.get("prefixItems"), "prefixItems"
        if isinstance(items, list) and first is None:  # the drafts before 2020
            items, first, place = node.get("additionalItems"), items, "items"
        if first is not None:
            if not isinstance(first, list):
                raise SchemaError((*path, place), "must be a list of schemas")
            result["prefixItems"] = [
                self.schema(item, (*path, place, i)) for i, item in enumerate(first)
            ]
        if items is not None:
            name = "items" if place == "prefixItems" else "additionalItems"
            result["items"] = self.schema(items, (*path, name))

    def _object(self, node: dict[str, Any], path: Path, result: dict[str, Any]) -> None:
        properties, required = node.get("properties", {}), node.get("required", [])
        for name in ("properties", "patternProperties"):
            if not isinstance(node.get(name, {}), dict):
                raise SchemaError((*path, name), "must be an object of schemas")
        if not isinstance(required, list) or not all(isinstance(n, str) for n in required):
            raise SchemaError((*path, "required"), "must be a list of strings")
        patterns = self._patterns(node, path, is_alone=not properties and not required)
        further = node.get("additionalProperties", node.get("unevaluatedProperties"))
        if node.get("patternProperties") and patterns is None and further not in (None, True):
            problem = "is not followed beside patternProperties. Fix: leave it out"
            self._leave_out((*path, "additionalProperties"), problem)
            further = True  # as nobody can tell which names are others
        if further is None:
            further = not (self._closed and properties)
        missing = [name for name in required if name not in properties]
        if missing and further is False:
            problem = f"has {missing[0]!r}, which is none of the properties. Fix: add it there"
            raise SchemaError((*path, "required"), problem)
        if "propertyNames" in node and (properties or missing or patterns):
            problem = "is not followed beside properties. Fix: leave it out"
            self._leave_out((*path, "propertyNames"), problem)
        elif "propertyNames" in node:
            names = self.schema(node["propertyNames"], (*path, "propertyNames"))
            result["propertyNames"] = names
        said = ("properties", "required", "additionalProperties", "unevaluatedProperties")
        if not patterns and not any(node.get(name) not in (None, {}, []) for name in said):
            if "type" in node and "properties" in node:
                result["properties"] = {}  # who names none may still want none
            return
        others = self.schema(further, (*path, "additionalProperties"))
        fields = {n: self.schema(s, (*path, "properties", n)) for n, s in properties.items()}
        fields |= dict.fromkeys(missing, others)
        result |= {"properties": fields} if fields else {}
        result |= {"required": list(dict.fromkeys(required))} if required else {}
        result |= {"patternProperties": patterns} if patterns else {}
        result["additionalProperties"] = others

    def _patterns(
        self, node: dict[str, Any], path: Path, *, is_alone: bool
    ) -> dict[str, Any] | None:
        """``patternProperties``, of which all names are, then; None: they are not followed.

        Which others of the patterns a name fits, or which name that the schema has, is not told.
        """
        patterns, place = node.get("patternProperties"), (*path, "patternProperties")
        if not patterns:
            return None
        try:
            if not is_alone or len({orjson.dumps(each) for each in patterns.values()}) > 1:
                raise ValueError("is followed alone, and with one schema for all of it")
            for pattern in patterns:
                check_pattern(pattern)
        except ValueError as error:
            self._leave_out(place, f"{error}. Fix: leave it out")
            return None
        return {n: self.schema(s, (*place, n)) for n, s in patterns.items()}


def _step(node: object, origin: Path, part: str, place: Path, ref: str) -> tuple[object, Path]:
    if isinstance(node, dict) and part in node:
        return node[part], (*origin, part)
    if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
        return node[int(part)], (*origin, int(part))
    raise SchemaError(place, f"is {ref!r}, which is not there. Fix: point at what the schema has")


def _is_of(value: object, kinds: tuple[str, ...]) -> bool:
    names: Mapping[str, Callable[[object], bool]] = {
        "string": lambda v: isinstance(v, str),
        "boolean": lambda v: isinstance(v, bool),
        "null": lambda v: v is None,
        "object": lambda v: isinstance(v, dict),
        "array": lambda v: isinstance(v, list),
        "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
        "integer": lambda v: (
            isinstance(v, int | float) and not isinstance(v, bool) and float(v).is_integer()
        ),
    }
    return any(names[kind](value) for kind in kinds)
