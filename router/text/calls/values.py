"""Values that models write without JSON's quotes, as the JSON that clients get. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

_BOUNDS = frozenset({"pattern", "minLength", "maxLength", "format", "const", "allOf", "not"})


def json_string(text: str) -> str:
    """``text`` as a JSON string."""
    return orjson.dumps(text).decode()


def json_value(text: str, types: set[str]) -> str:
    """``text`` as JSON, a string where it is none or where ``types`` know nothing else."""
    if types == {"string", "null"} and text.strip() != "null":
        return json_string(text)
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return json_string(text)
    is_other = types == {"string"} and not isinstance(value, str)
    return json_string(text) if is_other else text.strip()


def is_text(schema: Mapping[str, Any], key: str) -> bool:
    """Whether the property ``key`` is a string that is written as it is, whatever it says.

    One that is bound by more than its type may come as JSON: a grammar of it is one of JSON.
    """
    if types_of(schema, key) != {"string"}:
        return False
    return not _BOUNDS & schema["properties"][key].keys()


def types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """The types that the property ``key`` may have, as far as ``schema`` says."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(found)


def _types(schema: object) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    types = {kinds} if isinstance(kinds, str) else set(kinds if isinstance(kinds, list) else ())
    for union in ("anyOf", "oneOf"):
        branches = schema.get(union)
        if isinstance(branches, list):
            types = types.union(*map(_types, branches))
    return {kind for kind in types if isinstance(kind, str)}
