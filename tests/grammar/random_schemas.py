"""Random schemas of the kinds that the JSON Schema test suite has; most have a value."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NAMES = ["a", "b", "foo", "foo bar", 'q"uote', "\u00fc", "new\nline", "", "a/b", "toString"]
VALUES: list[Any] = [0, 1, -3, 1.5, True, False, None, "a", 'x"y', "\u00fc\n", [], [1], {"a": 1}]
PATTERNS = [
    *("^[a-c]{1,3}$", "a|bb", r"^\d+-\w$", "^[^x]{2}$", r"^(a[ -~]?)+$", r"^\S$", "^a.*z$"),
    *(r"^[A-Z][a-z]{2,20}( [a-z]+){0,3}$", r"^(?<y>\d{4})-(?<m>\d\d)$", '^"\\\\?$'),
    *("^(?!x)a", r"^\p{L}+$", r"\bword\b", "(?i:a)", r"^(a)\1$"),
]
FORMATS = [
    *("date", "time", "date-time", "duration", "uuid", "email", "hostname", "ipv4", "ipv6", "uri"),
    *("uri-reference", "json-pointer", "regex", "path", "unknown"),
]
LENGTHS = [0, 1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 127, 128, 129]


class RandomSchemas:
    """Schemas by one seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._defs: dict[str, Any] = {}
        makers: list[tuple[int, Callable[[int], Any]]] = [
            *((3, self._string), (3, self._number), (1, self._enum), (1, self._kinds)),
            *((4, self._object), (2, self._map), (3, self._array), (2, self._tuple)),
            *((3, self._union), (2, self._reference), (1, self._oddity), (1, self._all_of)),
        ]
        self._makers = [make for weight, make in makers for _ in range(weight)]

    def schema(self) -> dict[str, Any]:
        """The next one."""
        self._defs = {}
        found: dict[str, Any] = self._any(3)
        if self._defs:
            found = {**found, "$defs": self._defs}
        return found

    def _any(self, depth: int) -> Any:
        makers = self._makers if depth else self._makers[:8]
        return self._rng.choice(makers)(depth - 1)

    def _is(self, chance: float = 0.5) -> bool:
        return self._rng.random() < chance

    def _counts(self, what: str, values: list[int]) -> dict[str, int]:
        first, last = sorted(self._rng.choices(values, k=2))
        found = {}
        if self._is():
            found[f"min{what}"] = first
        if self._is():
            found[f"max{what}"] = last
        return found

    def _string(self, _depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "string"}
        kind = self._rng.randrange(4)
        if kind == 1:
            found["pattern"] = self._rng.choice(PATTERNS)
        elif kind == 2:
            found["format"] = self._rng.choice(FORMATS)
        if kind == 3 or self._is(0.1):
            found |= self._counts("Length", LENGTHS)
        return found

    def _number(self, _depth: int) -> dict[str, Any]:
        rng, kind = self._rng, self._rng.choice(["integer", "number"])
        found: dict[str, Any] = {"type": kind}
        digits = rng.choice([0, 0, 1, 3])
        first = round(rng.uniform(-1, 1) * 10 ** rng.randrange(5), digits)
        width = round(rng.random() * 10 ** rng.randrange(5), digits) + (
            2 if kind == "integer" else 1
        )
        ends = [int(first) if not digits else first, int(first + width) if not digits else None]
        low, high = ends[0], ends[1] if ends[1] is not None else round(first + width, digits)
        if self._is():
            found[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if self._is():
            found[rng.choice(["maximum", "exclusiveMaximum"])] = high
        if self._is(0.2):
            found["multipleOf"] = rng.choice([1, 2, 5, 7, 10, 0.01, 0.5])
        return found

    def _enum(self, _depth: int) -> dict[str, Any]:
        if self._is(0.3):
            return {"const": self._rng.choice(VALUES)}
        return {"enum": self._rng.sample(VALUES, self._rng.randint(1, 5))}

    def _kinds(self, _depth: int) -> Any:
        kinds = ["string", "number", "integer", "boolean", "null"]
        several = self._rng.sample(kinds, self._rng.randint(1, 3))
        found = {"type": several, "description": "of no effect", "title": "It", "default": None}
        return self._rng.choice([found, {"type": several[0]}, {}, True])

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._rng.sample(NAMES, self._rng.randint(0, 5))
        found: dict[str, Any] = {"properties": {name: self._any(depth) for name in names}}
        if self._is(0.9):
            found["type"] = "object"
        required = [name for name in names if self._is()]
        if self._is(0.1):
            required.append("more")
        if required or self._is():
            found["required"] = required
        if self._is(0.6) and "more" not in required:
            found["additionalProperties"] = self._rng.choice([False, False, True, self._any(depth)])
        if self._is(0.2):
            found |= self._counts(
                "Properties", [len(required), len(required) + 1, len(required) + 2]
            )
        if self._is(0.1):
            found["unevaluatedProperties"] = True
        return found

    def _map(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "object"}
        if self._is(0.4):
            found["propertyNames"] = self._rng.choice(
                [self._string(0), {"enum": ["a", "b"]}, {"maxLength": 3}, True]
            )
        if self._is(0.4):
            found["patternProperties"] = {self._rng.choice(PATTERNS): self._any(depth)}
        if self._is(0.7):
            found["additionalProperties"] = self._rng.choice([self._any(depth), True])
        found |= self._counts("Properties", [0, 1, 2, 3])
        return found

    def _array(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "array", **self._counts("Items", [0, 1, 2, 3, 4])}
        if self._is(0.9):
            found["items"] = self._any(depth)
        if self._is(0.1):
            found[self._rng.choice(["uniqueItems", "contains"])] = True
        return found

    def _tuple(self, depth: int) -> dict[str, Any]:
        first = [self._any(depth) for _ in range(self._rng.randint(1, 3))]
        further = self._rng.choice([False, True, None, self._any(depth)])
        if self._is(0.2):  # as drafts before 2020 have it
            old: dict[str, Any] = {"type": "array", "items": first}
            return old if further is None else {**old, "additionalItems": further}
        found: dict[str, Any] = {"type": "array", "prefixItems": first}
        if further is not None:
            found["items"] = further
        return {**found, **self._counts("Items", [0, 1, len(first)])}

    def _union(self, depth: int) -> dict[str, Any]:
        branches = [self._any(depth) for _ in range(self._rng.randint(1, 3))]
        nullable = [{"type": "null"}] * self._is()
        found: dict[str, Any] = {self._rng.choice(["anyOf", "oneOf"]): [*branches, *nullable]}
        if self._is(0.1):
            found["minLength"] = 2
        return found

    def _all_of(self, depth: int) -> dict[str, Any]:
        return {"allOf": [self._any(depth) for _ in range(self._rng.randint(1, 2))]}

    def _reference(self, depth: int) -> dict[str, Any]:
        name = f"d{len(self._defs)}/~"
        self._defs[name] = {}
        ref = {"$ref": f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}"}
        if self._is(0.3):  # a tree
            inner = {"value": self._any(depth), "next": ref, "all": {"type": "array", "items": ref}}
            self._defs[name] = {"type": "object", "properties": inner, "required": ["value"]}
        else:
            self._defs[name] = self._any(depth)
        return ref

    def _oddity(self, depth: int) -> dict[str, Any]:
        inner = self._any(depth)
        return self._rng.choice(
            [
                {"not": inner},
                {"if": inner, "then": inner},
                {"type": "object", "dependentRequired": {"a": ["b"]}},
                {"$ref": "https://example.com/schema"},
                {"$ref": "#name"},
                {"type": "string", "maxLength": 1048576},
                {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
                {"type": "integer", "minimum": 0.5},
                {"$comment": "of no effect", "examples": [1]},
            ]
        )
