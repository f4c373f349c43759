"""What clients ask an answer to look like, of every spelling that is in use, as one form. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from router.errors import RequestError
from router.http.openai.schema import GenerationRequest, check_depth
from router.http.openai.schema_forms import MAX_TEXT_BYTES, form_of_schema
from router.http.openai.structural_tags import structural_form
from router.text.grammar.forms import Form, by_rules, matching, one_of, text

MAX_CHOICES = 1000
_OBJECT = {"type": "object"}
_FORMATS = "Fix: send text, json_object, json_schema or structural_tag"
_HARMLESS: Mapping[str, tuple[object, ...]] = {
    "disable_fallback": (True, False),
    "disable_any_whitespace": (True, False),
    "disable_additional_properties": (True,),
    "whitespace_pattern": (),
}
"""Fields of ``structured_outputs`` beside what they ask for, with the values that are followed."""


def form_of(request: GenerationRequest) -> tuple[str, Form] | None:
    """What the answer has to look like, with the field that says so; None: no field does.

    Raises:
        RequestError: two fields do, or no grammar can be made of what one says.
    """
    asked = _asked(request)
    if len(asked) > 1:
        first, second = list(asked)[:2]
        raise RequestError(
            f"{second} says what the answer has to look like, and so does {first}. "
            "Fix: send one of them",
            param=second,
        )
    for param, make in asked.items():
        return param, make(param)
    return None


def _asked(request: GenerationRequest) -> dict[str, Callable[[str], Form]]:
    """How each field that says something becomes a form."""
    asked: dict[str, Callable[[str], Form]] = {}
    response_format = request.response_format
    if response_format is not None and response_format.get("type") != "text":
        asked["response_format"] = lambda param: _of_response_format(response_format, param)
    extra = request.model_extra
    if not extra:
        return asked
    for name, make in _MAKERS.items():
        if extra.get(name) is not None:
            asked[name] = _bound(make, extra[name])
    structured = extra.get("structured_outputs")
    if structured is not None:
        asked |= _of_structured_outputs(structured)
    return asked


def _bound(make: Callable[[object, str], Form], value: object) -> Callable[[str], Form]:
    return lambda param: make(value, param)


def _of_response_format(value: Mapping[str, Any], param: str) -> Form:
    kind = value.get("type")
    if kind == "json_object":
        return form_of_schema(_OBJECT, param)
    if kind == "structural_tag":
        return structural_form(value, param)
    if kind != "json_schema":
        raise RequestError(
            f"{param}.type = {kind!r} is not supported by this server. {_FORMATS}",
            param=f"{param}.type",
            code="unsupported_value",
        )
    inner, place = value.get("json_schema"), f"{param}.json_schema"
    if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping | bool):
        place += ".schema" if isinstance(inner, Mapping) else ""
        what = "a JSON schema" if isinstance(inner, Mapping) else "an object with name and schema"
        raise RequestError(f"{place} is missing. Fix: send {what}", param=place)
    strict = inner.get("strict")
    if not isinstance(strict, bool | None):
        place += ".strict"
        raise RequestError(f"{place} = {strict!r}. Fix: send true or false", param=place)
    # Without strict OpenAI promises no more than to try; all that a grammar can say holds anyway.
    return form_of_schema(
        inner["schema"],
        f"{place}.schema",
        closed=strict is True,
        lenient=strict is not True,
        is_compact=True,
    )


def _of_structured_outputs(value: object) -> dict[str, Callable[[str], Form]]:
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be an object. Fix: send one constraint in it", param=name)
    asked: dict[str, Callable[[str], Form]] = {}
    for key, given in value.items():
        if given is None or key.startswith("_"):
            continue
        param = f"{name}.{key}"
        make = _STRUCTURED.get(key)
        if make is not None:
            has_space = key == "json" and value.get("disable_any_whitespace") is False
            asked[param] = _bound(_json_with_space if has_space else make, given)
        elif given not in _HARMLESS.get(key, ()):
            fix = f"Fix: send one of {', '.join(_STRUCTURED)}"
            raise RequestError(
                f"{param} = {str(given)[:40]!r} is not supported by this server. {fix}",
                param=param,
                code="unsupported_value",
            )
    if not asked:
        fix = f"Fix: send one of {', '.join(_STRUCTURED)}, or leave it out"
        raise RequestError(f"{name} says nothing. {fix}", param=name)
    return asked


def _read(value: object, param: str, what: str) -> object:
    """``value``, or the JSON that it is as a text."""
    if not isinstance(value, str):
        return value
    try:
        found: object = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        problem = f"{param} is no JSON: {error}. Fix: send {what}"
        raise RequestError(problem, param=param) from error
    check_depth(param, found)
    return found


def _json(value: object, param: str, *, is_compact: bool = True) -> Form:
    schema = _read(value, param, "a JSON schema")
    # The servers that have this field take a schema for all that an object may have.
    return form_of_schema(schema, param, closed=True, is_compact=is_compact)


def _json_with_space(value: object, param: str) -> Form:
    return _json(value, param, is_compact=False)


def _structural(value: object, param: str) -> Form:
    found = _read(value, param, "a structural tag")
    if not isinstance(found, Mapping):
        raise RequestError(f"{param} must be an object. Fix: send a structural tag", param=param)
    return structural_form(found, param)


def _json_object(value: object, param: str) -> Form:
    if value is not True:
        raise RequestError(f"{param} = {value!r}: it must be true. Fix: leave it out", param=param)
    return form_of_schema(_OBJECT, param)


def _text(value: object, param: str, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value.encode()) <= MAX_TEXT_BYTES:
        raise RequestError(
            f"{param} must be {what} of 1 to {MAX_TEXT_BYTES} bytes. Fix: send one as a string",
            param=param,
        )
    return value


def _regex(value: object, param: str) -> Form:
    return matching(_text(value, param, "a regular expression"))


def _ebnf(value: object, param: str) -> Form:
    return by_rules(_text(value, param, "a grammar in EBNF, whose rule root is the answer,"))


def _choice(value: object, param: str) -> Form:
    is_list = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
    if not isinstance(value, list) or not is_list or not all(_is_choice(item) for item in value):
        raise RequestError(
            f"{param} must be a list of 1 to {MAX_CHOICES} strings, none of them empty. "
            "Fix: send one",
            param=param,
        )
    return one_of([text(item) for item in dict.fromkeys(value)])


def _is_choice(item: object) -> bool:
    return isinstance(item, str) and item != ""


_MAKERS: Mapping[str, Callable[[object, str], Form]] = {
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
    "json_schema": _json,
    "regex": _regex,
    "ebnf": _ebnf,
}
"""Of fields that other servers have at the top level."""
_STRUCTURED: Mapping[str, Callable[[object, str], Form]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "json_object": _json_object,
    "structural_tag": _structural,
}
FIELDS = ("structured_outputs", *_MAKERS)
"""Of bodies, beside ``response_format``."""
