"""Values that models write without JSON's quotes, as the JSON that clients get. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson


def json_string(text: str) -> str:
    """``text`` as a JSON string."""
    return orjson.dumps(text).decode()


def json_value(text: str, types: set[str]) -> str:
    """``text`` as JSON, a string where it is none or where ``types`` know nothing else."""
    if types == {"string", "null"} and text.strip() != "null":
        return json_string(text)
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return json_string(text)
    return text.strip()


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
