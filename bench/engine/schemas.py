"""Schemas that bind the requests of a measurement, each another one, and a vocabulary for them."""

from __future__ import annotations

import json
import random
from typing import Any, Final

from engine.constraint.vocabulary import Vocabulary
from runtime.sampling import OutputConstraint

STOP: Final = 1
"""The token after which an output may end: a special one of the bundled vocabulary."""
_TYPES: Final[tuple[dict[str, Any], ...]] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"enum": ["low", "middle", "high"]},
)


def draw_schema(number: int, num_fields: int, draw: random.Random) -> OutputConstraint:
    """An object of so many fields, all required, with the number in their names."""
    import xgrammar

    names = [f"field_{number}_{place}" for place in range(num_fields)]
    schema = {
        "type": "object",
        "properties": {name: draw.choice(_TYPES) for name in names},
        "required": names,
        "additionalProperties": False,
    }
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
    return OutputConstraint(grammar=grammar.serialize_json())


def widened(vocabulary: Vocabulary, draw: random.Random) -> Vocabulary:
    """The same with pairs of pieces for all ids that have none."""
    pieces = list(vocabulary.pieces)
    special = set(vocabulary.special.values())
    texts = [piece for piece in pieces if piece and piece not in special]
    known = set(pieces)
    for token_id, piece in enumerate(pieces):
        while not piece:
            pair = draw.choice(texts) + draw.choice(texts)
            if pair not in known:
                known.add(pair)
                pieces[token_id] = piece = pair
    return Vocabulary(pieces=pieces, encoding=vocabulary.encoding, special=vocabulary.special)
