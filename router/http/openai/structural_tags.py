"""``structural_tag``, as other servers take it: parts of an answer, one in another. Pure.

Two spellings are in use. ``format`` is a tree of parts, as xgrammar has them. ``structures`` with
``triggers`` is the older one: text, in which each trigger begins one of the structures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grammar.schemas.schema import Canonical
from router.errors import RequestError
from router.http.openai.schema_forms import MAX_TEXT_BYTES, form_of_schema
from router.text.grammar.forms import Form, Format, by_rules, matching, text

MAX_PARTS = 1000
"""Of one list."""
MAX_REPEATS = 100_000

_Make = Callable[[Mapping[str, Any], str], Form]


def structural_form(value: Mapping[str, Any], param: str) -> Form:
    """The form of a structural tag, which the field ``param`` holds.

    Raises:
        RequestError: says which part of it is wrong.
    """
    if "format" in value:
        _only(value, param, ("type", "format"))
        return _form(value["format"], f"{param}.format")
    if "structures" in value:
        _only(value, param, ("type", "structures", "triggers"))
        return _of_structures(value, param)
    raise RequestError(
        f"{param} has neither format nor structures. Fix: send a format", param=f"{param}.format"
    )


def _of_structures(value: Mapping[str, Any], param: str) -> Form:
    tags: list[Format] = []
    schemas: list[tuple[str, Canonical]] = []
    for number, each in enumerate(_list(value, "structures", param)):
        place = f"{param}.structures[{number}]"
        node = _mapping(each, place)
        _only(node, place, ("begin", "schema", "end"))
        content = form_of_schema(node.get("schema"), f"{place}.schema", closed=True)
        ends = {name: _text(node, name, place) for name in ("begin", "end")}
        tags.append({"type": "tag", "content": content.format, **ends})
        schemas += content.schemas
    triggers = _texts(value, "triggers", param, at_least=1)
    return Form(
        format={"type": "triggered_tags", "triggers": triggers, "tags": tags},
        schemas=tuple(schemas),
    )


def _form(node: object, param: str) -> Form:
    node = _mapping(node, param)
    make = _MAKERS.get(str(node.get("type")))
    if make is None:
        raise RequestError(
            f"{param}.type = {str(node.get('type'))[:40]!r} is not supported by this server. "
            f"Fix: send one of {', '.join(_MAKERS)}",
            param=f"{param}.type",
            code="unsupported_value",
        )
    return make(node, param)


def _json_schema(node: Mapping[str, Any], param: str) -> Form:
    style = node.get("style", "json")
    if style != "json":
        raise _wrong(f"{param}.style", style, '"json"')
    _only(node, param, ("type", "json_schema", "style"))
    return form_of_schema(node.get("json_schema"), f"{param}.json_schema", closed=True)


def _leaf(name: str, make: Callable[[str], Form]) -> _Make:
    def made(node: Mapping[str, Any], param: str) -> Form:
        _only(node, param, ("type", name))
        return make(_text(node, name, param))

    return made


def _any_text(node: Mapping[str, Any], param: str) -> Form:
    _only(node, param, ("type", "excludes"))
    return Form(format={"type": "any_text", "excludes": _texts(node, "excludes", param)})


def _elements(node: Mapping[str, Any], param: str) -> Form:
    _only(node, param, ("type", "elements"))
    return _of_list(node, "elements", param, [])


def _tag(node: Mapping[str, Any], param: str) -> Form:
    _only(node, param, ("type", "begin", "content", "end"))
    content = _form(node.get("content"), f"{param}.content")
    end = node.get("end")
    end = _texts(node, "end", param, at_least=1) if isinstance(end, list) else node.get("end")
    if not isinstance(end, str | list):
        raise _wrong(f"{param}.end", end, "a string or a list of strings")
    begin = _text(node, "begin", param)
    return Form(
        format={"type": "tag", "begin": begin, "content": content.format, "end": end},
        schemas=content.schemas,
    )


def _tags(node: Mapping[str, Any], param: str) -> Form:
    """``triggered_tags`` or ``tags_with_separator``."""
    switches = ("at_least_one", "stop_after_first")
    own = ("triggers", "excludes") if node["type"] == "triggered_tags" else ("separator",)
    _only(node, param, ("type", "tags", *own, *switches))
    rest: list[tuple[str, object]] = [(name, _switch(node, name, param)) for name in switches]
    if "separator" in own:
        rest.append(("separator", _text(node, "separator", param)))
    else:
        rest.append(("triggers", _texts(node, "triggers", param, at_least=1)))
        rest.append(("excludes", _texts(node, "excludes", param)))
    for number, each in enumerate(_list(node, "tags", param)):
        place = f"{param}.tags[{number}]"
        kind = _mapping(each, place).get("type", "tag")
        if kind != "tag":
            raise _wrong(f"{place}.type", kind, '"tag"')
    tags = [{**each, "type": "tag"} for each in node["tags"]]
    return _of_list({**node, "tags": tags}, "tags", param, rest)


def _content(node: Mapping[str, Any], param: str) -> Form:
    """``optional``, ``plus`` or ``star``."""
    _only(node, param, ("type", "content"))
    return _around(node, param, {})


def _repeat(node: Mapping[str, Any], param: str) -> Form:
    _only(node, param, ("type", "content", "min", "max"))
    bounds = {}
    for name, least in (("min", 0), ("max", -1)):
        value = node.get(name)
        if type(value) is not int or not least <= value <= MAX_REPEATS:
            raise _wrong(f"{param}.{name}", value, f"an integer from {least} to {MAX_REPEATS}")
        bounds[name] = value
    return _around(node, param, bounds)


def _around(node: Mapping[str, Any], param: str, rest: Mapping[str, object]) -> Form:
    content = _form(node.get("content"), f"{param}.content")
    return Form(
        format={"type": node["type"], "content": content.format, **rest}, schemas=content.schemas
    )


def _of_list(
    node: Mapping[str, Any], name: str, param: str, rest: Sequence[tuple[str, object]]
) -> Form:
    forms = [
        _form(each, f"{param}.{name}[{number}]")
        for number, each in enumerate(_list(node, name, param))
    ]
    return Form(
        format={"type": node["type"], name: [form.format for form in forms], **dict(rest)},
        schemas=tuple(schema for form in forms for schema in form.schemas),
    )


def _mapping(node: object, param: str) -> Mapping[str, Any]:
    if not isinstance(node, Mapping):
        raise _wrong(param, node, "an object")
    return node


def _list(node: Mapping[str, Any], name: str, param: str) -> list[Any]:
    value = node.get(name)
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PARTS:
        raise RequestError(
            f"{param}.{name} must be a list of 1 to {MAX_PARTS} objects. Fix: send one",
            param=f"{param}.{name}",
        )
    return value


def _texts(node: Mapping[str, Any], name: str, param: str, *, at_least: int = 0) -> list[str]:
    value = node.get(name)
    found = [] if value is None else value
    is_list = isinstance(found, list) and at_least <= len(found) <= MAX_PARTS
    if not is_list or not all(isinstance(each, str) and each for each in found):
        raise _wrong(f"{param}.{name}", value, "a list of strings, none of them empty")
    return list(found)


def _text(node: Mapping[str, Any], name: str, param: str) -> str:
    value = node.get(name)
    if not isinstance(value, str) or len(value.encode()) > MAX_TEXT_BYTES:
        raise _wrong(f"{param}.{name}", value, f"a string of at most {MAX_TEXT_BYTES} bytes")
    return value


def _switch(node: Mapping[str, Any], name: str, param: str) -> bool:
    value = node.get(name, False)
    if not isinstance(value, bool):
        raise _wrong(f"{param}.{name}", value, "true or false")
    return value


def _only(node: Mapping[str, Any], param: str, known: Sequence[str]) -> None:
    for name in node:
        if name not in known:
            raise RequestError(
                f"{param}.{name} is not supported by this server. Fix: leave it out",
                param=f"{param}.{name}",
                code="unsupported_value",
            )


def _wrong(param: str, value: object, wanted: str) -> RequestError:
    return RequestError(f"{param} = {str(value)[:40]!r}. Fix: send {wanted}", param=param)


_MAKERS: Mapping[str, _Make] = {
    "json_schema": _json_schema,
    "const_string": _leaf("value", text),
    "regex": _leaf("pattern", matching),
    "grammar": _leaf("grammar", by_rules),
    "any_text": _any_text,
    "sequence": _elements,
    "or": _elements,
    "tag": _tag,
    "triggered_tags": _tags,
    "tags_with_separator": _tags,
    "optional": _content,
    "plus": _content,
    "star": _content,
    "repeat": _repeat,
}
