"""What every client asks for, and how a script tells what it got."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

URL = sys.argv[1] if len(sys.argv) > 1 else ""
"""Of the router, without `/v1`."""
MODEL = "tandem-python"
PROMPT = "def fibonacci(n):"
MAX_TOKENS = 500
"""A document of ``Answer``, or a call, is shorter, white space and all."""


class Answer(BaseModel):
    """What an answer has to look like, and no field more: the model would not come to an end."""

    model_config = ConfigDict(extra="forbid")

    ok: bool
    size: Literal["small", "large"]


def paint(color: Literal["red", "blue"]) -> str:
    """Paint the house.

    Args:
        color: of the walls.
    """
    return f"The house is {color}."


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"type": "string", "enum": ["red", "blue"]}},
    "required": ["color"],
    "additionalProperties": False,
}


def tell(**found: Any) -> None:
    """Write what the test looks at, as the last line."""
    print(json.dumps(found))
