"""JSON and TOML from outside: whatever is wrong with a text is a ValueError.

Python's parsers raise RecursionError for what is nested too deep, and no caller thinks of it.
"""

from __future__ import annotations

import json
import tomllib
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value that ``text`` is.

    Raises:
        ValueError: it is no JSON, or nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def parse_toml(text: str) -> dict[str, Any]:
    """The table that ``text`` is.

    Raises:
        ValueError: it is no TOML, or nested too deep.
    """
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
