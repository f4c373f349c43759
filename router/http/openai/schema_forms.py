"""Forms of the schemas that clients send; refusals name the place in the field. Pure."""

from __future__ import annotations

from grammar.schemas.schema_errors import SchemaError, spelled, with_fix
from router.errors import RequestError
from router.text.grammar.forms import Form, json_of

MAX_TEXT_BYTES = 64 * 2**10
"""Of a regular expression or a grammar as it is sent."""


def form_of_schema(
    schema: object,
    param: str,
    *,
    closed: bool = False,
    lenient: bool = False,
    is_compact: bool = False,
) -> Form:
    """``json_of`` whose refusals name the place within the field ``param``."""
    try:
        return json_of(schema, param, closed=closed, lenient=lenient, is_compact=is_compact)
    except SchemaError as error:
        raise refused(error, param) from error


def refused(error: SchemaError, param: str) -> RequestError:
    """``error`` with the place within the field ``param``."""
    place = param + spelled(error.path)
    return RequestError(f"{place} {with_fix(error.problem)}", param=place)
