"""Walks through grammars of schemas: what is written is a document, and valid."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import jsonschema

from router.text.grammar.forms import json_of
from tests.grammar.writer import PIECES, Writer


def followed(schema: Any, left_out: tuple[tuple[str | int, ...], ...]) -> Any:
    """``schema`` as it is followed: without what was left out, and ``oneOf`` as ``anyOf``."""
    result = copy.deepcopy(schema)
    for path in left_out:
        node = result
        for part in path[:-1]:
            node = node[part]
        node.pop(path[-1], None)
    return _modern(result)


def _modern(node: Any) -> Any:
    """As the draft of 2020, and Python's patterns, say it."""
    if isinstance(node, str):
        return node.replace("(?<", "(?P<")
    if isinstance(node, list):
        return [_modern(each) for each in node]
    if not isinstance(node, dict):
        return node
    names = {"oneOf": "anyOf"}
    node = {names.get(name, _modern(name)): _modern(each) for name, each in node.items()}
    if isinstance(node.get("items"), list):
        node["prefixItems"] = node.pop("items")
        node |= {"items": node.pop("additionalItems")} if "additionalItems" in node else {}
    if node.get("exclusiveMinimum") is True:
        node["exclusiveMinimum"] = node.pop("minimum")
    return node


def repeats_a_name(text: str) -> bool:
    """Which no grammar keeps out; a parser takes the last, so there may be too few names."""
    found = False

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        found |= len(dict(pairs)) < len(pairs)
        return dict(pairs)

    json.loads(text, object_pairs_hook=look)
    return found


def walk(schema: Any, rng: random.Random, *, most: int = 600, times: int = 2) -> int:
    """The number of answers that came to an end: each is a document, and valid.

    Raises:
        NoDocumentError: nothing is valid.
    """
    form = json_of(schema, "x", lenient=True, is_compact=rng.random() < 0.7)
    ((_, found),) = form.schemas
    plain = followed(schema, found.left_out)
    draft = jsonschema.Draft202012Validator
    validator = draft(plain, format_checker=draft.FORMAT_CHECKER)
    writer, finished = Writer(form, PIECES), 0
    for _ in range(times):
        output = writer.write(rng, most)
        if output is None:
            continue
        finished += 1
        text = writer.text(output)
        document = json.loads(text)
        errors = [error.message for error in validator.iter_errors(document)]
        assert not errors or repeats_a_name(text), (schema, text, errors)
    return finished
