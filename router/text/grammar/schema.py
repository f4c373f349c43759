"""JSON schemas in the form that the library follows to the letter. Pure.

The library reads more than it follows: it passes over keywords that it does not know and over those
beside a ``$ref``, an ``anyOf`` or an ``enum``, takes a ``$ref`` elsewhere for anything, and asks
for no property that ``properties`` does not have. Here a schema is walked through once: what would
not hold is refused with its place, what can be said otherwise is rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import orjson

from router.text.grammar.pattern import escaped_pattern

MAX_BYTES = 256 * 2**10
MAX_DEPTH = 64
"""Names and numbers on the way to a schema, from the whole one or the reference to it."""
MAX_SCHEMAS = 10_000
"""Schemas within one schema."""
MAX_COUNT = 100_000
"""Of items, characters or properties that a schema may ask for or bound."""
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_COMBINATORS = ("anyOf", "oneOf", "allOf")
_NEVER = {
    **dict.fromkeys(("not", "if", "then", "else", "contains", "patternProperties")),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies")),
    **dict.fromkeys(("unevaluatedItems", "$dynamicRef", "$recursiveRef", "additionalItems")),
    "minContains": 0,
    "uniqueItems": False,
}
"""Keywords that no grammar follows here, each with the value that says nothing."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_CONSTRAINTS = frozenset(
    {
        *("type", "enum", "const", "$ref", "properties", "required", "additionalProperties"),
        *("unevaluatedProperties", "propertyNames", "items", "prefixItems", "pattern", "format"),
        *_COMBINATORS,
        *_BOUNDS,
        *_COUNTS,
        *_NEVER,
    }
)
"""All else is an annotation."""
Path = tuple[str | int, ...]


class SchemaError(ValueError):
    """A schema that no grammar can be made of: where in it, and why."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(problem)
        self.path = path
        self.problem = problem


def spelled(path: Path) -> str:
    """``("properties", "a", "enum", 0)`` as ``.properties.a.enum[0]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)


def with_fix(problem: str) -> str:
    """``problem``, with what to do."""
    return problem if "Fix: " in problem else f"{problem}. Fix: change it there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Canonical:
    """A schema that means what it says."""

    schema: dict[str, Any] | bool
    origins: Mapping[str, Path]
    """Where each of its ``$defs`` stands in what the client sent."""
    left_out: tuple[Path, ...]
    """Keywords that are not followed."""

    def origin(self, path: Path) -> Path:
        """Where the client has what stands at ``path`` here."""
        if path[:1] == ("$defs",) and len(path) > 1:
            return (*self.origins[str(path[1])], *path[2:])
        return path


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
    return Canonical(schema=result, origins=walk.origins, left_out=tuple(walk.left_out))


@dataclass(slots=True)
class _Walk:
    """One walk through one schema."""

    root: object
    closed: bool
    lenient: bool
    defs: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Path] = field(default_factory=dict)
    left_out: list[Path] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """Of definitions, by reference."""
    waiting: list[tuple[str, object]] = field(default_factory=list)
    num_schemas: int = 0

    def __init__(self, root: object, *, closed: bool, lenient: bool) -> None:
        self.root, self.closed, self.lenient = root, closed, lenient
        self.defs, self.origins, self.left_out = {}, {}, []
        self.names, self.waiting, self.num_schemas = {}, [], 0

    def schema(self, node: object, path: Path) -> dict[str, Any] | bool:
        """``node``, which stands at ``path``."""
        self.num_schemas += 1
        if self.num_schemas > MAX_SCHEMAS:
            raise SchemaError((), f"holds more than {MAX_SCHEMAS} schemas. Fix: send fewer")
        if len(path) > MAX_DEPTH:
            raise SchemaError(path[:8], f"is nested too deep. Fix: at most {MAX_DEPTH} levels")
        if isinstance(node, bool):
            return {} if node else False
        if not isinstance(node, dict):
            raise SchemaError(path, f"is {_shown(node)}. Fix: send an object or a boolean")
        node = self._without_never(node, path)
        for name, read in (("$ref", self._ref), ("const", self._enum), ("enum", self._enum)):
            if name in node:
                self._alone(node, path, name, {"type"} if read == self._enum else set())
                return read(node, path)
        for name in _COMBINATORS:
            if name in node:
                self._alone(node, path, name, set())
                return self._combined(node, path, name)
        return self._plain(node, path)

    def follow_references(self) -> None:
        """Walk through what references point at."""
        while self.waiting:
            name, node = self.waiting.pop()
            self.defs[name] = self.schema(node, self.origins[name])

    def _leave_out(self, path: Path, problem: str) -> None:
        if not self.lenient:
            raise SchemaError(path, problem)
        self.left_out.append(path)

    def _without_never(self, node: dict[str, Any], path: Path) -> dict[str, Any]:
        node = {name: value for name, value in node.items() if name in _CONSTRAINTS}
        for name in [name for name in node if name in _NEVER]:
            value = node.pop(name)
            if value != _NEVER[name] or isinstance(value, bool) != isinstance(_NEVER[name], bool):
                self._leave_out((*path, name), "is not followed by this server. Fix: leave it out")
        return node

    def _alone(self, node: dict[str, Any], path: Path, name: str, others: set[str]) -> None:
        """Refuse keywords beside ``name`` that would not be followed."""
        for other in node:
            if other != name and other not in others:
                problem = f"is not followed beside {name}. Fix: move it into the schemas there"
                self._leave_out((*path, other), problem)

    def _ref(self, node: dict[str, Any], path: Path) -> dict[str, Any]:
        ref, place = node["$ref"], (*path, "$ref")
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            problem = f"is {_shown(ref)}. Fix: send a reference within the schema, as #/$defs/NAME"
            raise SchemaError(place, problem)
        if ref not in self.names:
            target, origin = self._target(ref, place)
            name = self.names[ref] = f"d{len(self.names)}"
            self.origins[name] = origin
            self.waiting.append((name, target))
        return {"$ref": f"#/$defs/{self.names[ref]}"}

    def _target(self, ref: str, place: Path) -> tuple[object, Path]:
        """What ``ref`` points at, at the end of a chain of mere references."""
        seen: set[str] = set()
        while True:
            if ref in seen:
                raise SchemaError(place, f"{ref!r} leads back to itself. Fix: let it end somewhere")
            seen.add(ref)
            node: object = self.root
            origin: Path = ()
            for part in ref.split("/")[1:]:
                part = unquote(part).replace("~1", "/").replace("~0", "~")
                node, origin = _step(node, origin, part, place, ref)
            following = node.get("$ref") if isinstance(node, dict) else None
            if not isinstance(following, str) or not following.startswith("#"):
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
            found = [self.schema(b, (*path, name, i)) for i, b in enumerate(branches)]
            return found[0] if len(found) == 1 else {"anyOf": found}
        self._leave_out((*path, name), "of several schemas is not followed. Fix: join them in one")
        return {}

    def _types(self, node: dict[str, Any], path: Path) -> tuple[str, ...]:
        kinds = node.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or ("type" in node and not kinds):
            raise SchemaError((*path, "type"), "must be a string or a list of strings")
        for kind in kinds:
            if kind not in _TYPES:
                fix = f"Fix: send one of {', '.join(_TYPES)}"
                raise SchemaError((*path, "type"), f"is {_shown(kind)}. {fix}")
        return tuple(kinds)

    def _plain(self, node: dict[str, Any], path: Path) -> dict[str, Any]:
        kinds = self._types(node, path)
        result: dict[str, Any] = {"type": node["type"]} if kinds else {}
        for name in _BOUNDS:
            if name in node:
                result[name] = self._bound(node[name], (*path, name), kinds)
        for name in _COUNTS:
            if name in node:
                result[name] = _count(node[name], (*path, name))
        self._string(node, path, result)
        self._array(node, path, result)
        self._object(node, path, result)
        return {name: value for name, value in result.items() if value is not None}

    def _bound(self, value: object, path: Path, kinds: tuple[str, ...]) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SchemaError(path, f"is {_shown(value)}. Fix: send a number")
        if path[-1] == "multipleOf" and (kinds != ("integer",) or not isinstance(value, int)):
            self._leave_out(path, "is followed by integers alone. Fix: leave it out")
            return None
        if kinds == ("integer",) and value != int(value):
            raise SchemaError(path, f"is {value}. Fix: send an integer, as the type is integer")
        return int(value) if kinds == ("integer",) else value

    def _string(self, node: dict[str, Any], path: Path, result: dict[str, Any]) -> None:
        pattern, form = node.get("pattern"), node.get("format")
        least, most = result.pop("minLength", None), result.pop("maxLength", None)
        for name, value in (("pattern", pattern), ("format", form)):
            if value is not None and not isinstance(value, str):
                raise SchemaError((*path, name), f"is {_shown(value)}. Fix: send a string")
        if pattern is not None:
            try:
                result["pattern"] = escaped_pattern(pattern)
            except ValueError as error:
                raise SchemaError(
                    (*path, "pattern"), f"{error}. Fix: write it otherwise"
                ) from error
        elif form is not None:
            result["format"] = form
        elif least is not None or most is not None:
            # By itself the library takes the lengths for those of raw text, line feeds included.
            _in_order(path, "Length", least, most)
            bound = f"{least or 0},{'' if most is None else most}"
            result["pattern"] = f"^.{{{bound}}}$"
        leading = "pattern" if pattern is not None else "format" if form is not None else None
        for name, value in (("minLength", least), ("maxLength", most), ("format", form)):
            if leading is not None and name != leading and value is not None:
                problem = f"is not followed beside {leading}. Fix: say it in the pattern"
                self._leave_out((*path, name), problem)

    def _array(self, node: dict[str, Any], path: Path, result: dict[str, Any]) -> None:
        _in_order(path, "Items", result.get("minItems"), result.get("maxItems"))
        if "items" in node:
            result["items"] = self.schema(node["items"], (*path, "items"))
        if "prefixItems" in node:
            items = node["prefixItems"]
            if not isinstance(items, list):
                raise SchemaError((*path, "prefixItems"), "must be a list of schemas")
            result["prefixItems"] = [
                self.schema(item, (*path, "prefixItems", i)) for i, item in enumerate(items)
            ]

    def _object(self, node: dict[str, Any], path: Path, result: dict[str, Any]) -> None:
        _in_order(path, "Properties", result.get("minProperties"), result.get("maxProperties"))
        properties, required = node.get("properties", {}), node.get("required", [])
        if not isinstance(properties, dict):
            raise SchemaError((*path, "properties"), "must be an object of schemas")
        if not isinstance(required, list) or not all(isinstance(n, str) for n in required):
            raise SchemaError((*path, "required"), "must be a list of strings")
        further = node.get("additionalProperties", node.get("unevaluatedProperties"))
        if further is None:
            further = not (self.closed and properties)
        missing = [name for name in required if name not in properties]
        if missing and further is False:
            problem = f"has {missing[0]!r}, which is none of the properties. Fix: add it there"
            raise SchemaError((*path, "required"), problem)
        names = node.get("propertyNames")
        if names is not None and (properties or missing):
            problem = "is not followed beside properties. Fix: leave it out"
            self._leave_out((*path, "propertyNames"), problem)
        elif names is not None:
            result["propertyNames"] = self.schema(names, (*path, "propertyNames"))
        is_about_objects = properties or required or "additionalProperties" in node
        if not is_about_objects and "unevaluatedProperties" not in node:
            return
        place = (*path, "additionalProperties")
        others = self.schema(further, place)
        fields = {n: self.schema(s, (*path, "properties", n)) for n, s in properties.items()}
        fields |= dict.fromkeys(missing, others)
        fields = {n: s for n, s in fields.items() if s is not False or n in required}
        result |= {"properties": fields} if fields else {}
        result |= {"required": list(dict.fromkeys(required))} if required else {}
        result["additionalProperties"] = others


def _step(node: object, origin: Path, part: str, place: Path, ref: str) -> tuple[object, Path]:
    if isinstance(node, dict) and part in node:
        return node[part], (*origin, part)
    if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
        return node[int(part)], (*origin, int(part))
    raise SchemaError(place, f"is {ref!r}, which is not there. Fix: point at what the schema has")


def _count(value: object, path: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        fix = f"Fix: send an integer from 0 to {MAX_COUNT}"
        raise SchemaError(path, f"is {_shown(value)}. {fix}")
    return value


def _in_order(path: Path, what: str, least: int | None, most: int | None) -> None:
    if least is not None and most is not None and least > most:
        raise SchemaError((*path, f"min{what}"), f"is {least}, and max{what} is {most}")


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


def _shown(value: object) -> str:
    return repr(value)[:60]


def subschemas(schema: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """The schemas right below one in canonical form, with their paths."""
    if not isinstance(schema, dict):
        return
    for name in ("properties", "$defs"):
        for key, child in schema.get(name, {}).items():
            yield (*path, name, key), child
    for name in ("anyOf", "prefixItems"):
        for index, child in enumerate(schema.get(name, ())):
            yield (*path, name, index), child
    for name in ("items", "additionalProperties", "propertyNames"):
        if isinstance(schema.get(name), dict):
            yield (*path, name), schema[name]
