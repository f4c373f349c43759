"""Shapes of fields that bodies have and plain types do not say.

The checks raise ValueError with what is wrong.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, PlainValidator
from pydantic_core import PydanticCustomError


def neutral(*values: object) -> PlainValidator:
    """Refuse a field by name, but for null and ``values``, which change no answer."""

    def check(value: object) -> None:
        if value is not None and value not in values:
            raise PydanticCustomError("none_required", "not supported")

    return PlainValidator(check)


def _without_fraction(value: object) -> object:
    """``2.0`` is ``2``: there are writers of JSON that have one kind of numbers only."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_without_fraction)]


def stop_strings(value: object) -> list[str]:
    """``stop``: null, a string or a list of strings."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ValueError("must be a string or a list of strings")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def prompt_list(value: object) -> list[str | list[int]]:
    """``prompt`` in its four shapes, as a list of texts or token id lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(_is_ids(item) for item in value):
            return value
    raise ValueError(
        "must be a string, a list of strings, a list of token ids or a list of lists of token ids, "
        "and not empty"
    )


def bias_of_ids(value: object) -> dict[int, float]:
    """``logit_bias``: null, or numbers by token id."""
    if value is None:
        return {}
    try:
        if isinstance(value, dict) and not any(isinstance(v, bool | str) for v in value.values()):
            return {int(key): float(bias) for key, bias in value.items()}
    except (TypeError, ValueError):
        pass
    raise ValueError("must be an object of token id (as a string) to a number")
