"""What an output has to look like, as one tree of the library's formats. Pure.

Schemas stand in it in canonical form, of which ``documents`` makes rules: not the library.

A ``Form`` is such a tree with the places of its schemas in the request, so that what cannot be made
a grammar of is told by the field that says it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grammar.schemas.documents import KINDS, kinds_of
from grammar.schemas.plain_pattern import plain
from grammar.schemas.schema import Canonical, canonical
from grammar.schemas.schema_errors import spelled
from router.text.marks import MarkTable
from router.text.reasoning import ReasoningFormat

MAX_RIVALS = 4
"""Beyond which masks are made apart: each adds up to 10 ms to every one, of 130,000 tokens."""
Format = dict[str, Any]
"""One of the library's formats, or one of a schema: an object with a type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What an output, or a part of it, has to look like."""

    format: Format
    schemas: tuple[tuple[str, Canonical], ...] = ()
    """Those of ``format`` from the first to the last, each with the field that holds it."""

    @property
    def left_out(self) -> list[str]:
        """Fields that are not followed."""
        return [param + spelled(path) for param, found in self.schemas for path in found.left_out]


def is_guarded(asked: Form | None, form: Form | None) -> bool:
    """Whether finding what is to come may take long: a client wrote how it is read.

    Args:
        asked: what the client asks the answer to look like.
        form: what the output has to look like, ``asked`` within it.
    """
    is_free = asked is not None and not _is_listed(asked.format)
    schemas = () if form is None else form.schemas
    return is_free or any(
        _has_pattern(found.schema) or num_rivals(found.schema) > MAX_RIVALS for _, found in schemas
    )


def _is_listed(fmt: Format) -> bool:
    """Whether a format is made of texts and schemas alone."""
    if fmt["type"] == "or":
        return all(_is_listed(each) for each in fmt["elements"])
    return fmt["type"] in ("const_string", "json_schema")


def _has_pattern(schema: dict[str, Any] | bool) -> bool:
    patterns = ("pattern", "patternProperties")
    return any(not node.keys().isdisjoint(patterns) for node in _schemas_in(schema))


def _schemas_in(schema: dict[str, Any] | bool) -> Iterator[dict[str, Any]]:
    """A schema in canonical form and all within it; no names of properties, and no values."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, bool):
            continue
        yield node
        for name in ("properties", "patternProperties", "$defs"):
            waiting += node.get(name, {}).values()
        for name in ("anyOf", "prefixItems"):
            waiting += node.get(name, ())
        for name in ("items", "additionalProperties", "propertyNames"):
            waiting += [node[name]] if name in node else []


def num_rivals(schema: dict[str, Any] | bool) -> int:
    """How many schemas of ``anyOf`` are followed beside another one, as both are of one kind.

    Values in an ``enum`` are not counted: they differ by their text.

    Args:
        schema: in canonical form.
    """
    defs = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    number = 0
    for node in _schemas_in(schema):
        kinds = [kind for each in node.get("anyOf", ()) for kind in _kinds_of(each, defs)]
        number += max(Counter(kinds).values(), default=1) - 1
    return number


def _kinds_of(schema: dict[str, Any] | bool, defs: Mapping[str, Any]) -> set[str]:
    """Of the values of a schema, whatever references and unions stand before it."""
    found, known, waiting = set[str](), set[str](), [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, bool):
            found |= set(KINDS) if node else set()
        elif "$ref" in node:
            waiting += [] if node["$ref"] in known else [defs[node["$ref"].split("/")[-1]]]
            known.add(node["$ref"])
        elif "anyOf" in node:
            waiting += node["anyOf"]
        elif "enum" not in node:
            found |= set(kinds_of(node) or KINDS)
    return found


def text(value: str) -> Form:
    """``value`` itself."""
    return Form(format={"type": "const_string", "value": value})


def matching(pattern: str) -> Form:
    """What the regular expression ``pattern`` takes as a whole."""
    return Form(format={"type": "regex", "pattern": plain(pattern)})


def by_rules(ebnf: str) -> Form:
    """What the rule ``root`` of ``ebnf`` derives."""
    return Form(format={"type": "grammar", "grammar": ebnf})


def json_of(
    schema: object,
    param: str,
    *,
    closed: bool = False,
    lenient: bool = False,
    is_compact: bool = False,
) -> Form:
    """A document of ``schema``, which the field ``param`` holds; see ``canonical``.

    Raises:
        SchemaError: no grammar can be made of it.
    """
    found = canonical(schema, closed=closed, lenient=lenient)
    return json_of_canonical(found, param, is_compact=is_compact)


def json_of_canonical(found: Canonical, param: str, *, is_compact: bool = False) -> Form:
    """A document of ``found``, which the field ``param`` holds.

    ``is_compact``: without white space between its parts.
    """
    body = {"json_schema": found.schema, "is_compact": is_compact}
    return Form(format={"type": "json_schema", **body}, schemas=((param, found),))


def sequence(*forms: Form) -> Form:
    """One behind the other."""
    return _joined("sequence", forms)


def one_of(forms: Sequence[Form]) -> Form:
    """Any one."""
    return forms[0] if len(forms) == 1 else _joined("or", forms)


def maybe(form: Form) -> Form:
    """It, or nothing."""
    return Form(format={"type": "optional", "content": form.format}, schemas=form.schemas)


def any_number(form: Form) -> Form:
    """It, any number of times."""
    return Form(format={"type": "star", "content": form.format}, schemas=form.schemas)


def tag(begin: Form, content: Form, end: Form) -> Form:
    """One of ``tags``: its begin and end are a text or a mark."""
    opening, *inside = _elements(begin)
    *behind, closing = _elements(end)
    if inside or behind:  # the library's begins and ends are one text or one token
        content = sequence(*inside, content, *behind)
    parts = {"begin": _plain(opening), "content": content.format, "end": _plain(closing)}
    return Form(format={"type": "tag", **parts}, schemas=content.schemas)


def tags(each: Sequence[Form], separator: str, *, only_one: bool) -> Form:
    """At least one of the tags ``each``, with the ``separator`` between two; or only one."""
    schemas = tuple(schema for form in each for schema in form.schemas)
    rest = {"separator": separator, "at_least_one": True, "stop_after_first": only_one}
    formats = [form.format for form in each]
    return Form(format={"type": "tags_with_separator", "tags": formats, **rest}, schemas=schemas)


def triggered(
    marks: MarkForms, begin: str, content: Form, end: str, *, without: Sequence[str] = ()
) -> Form:
    """Any text but the marks ``without``; behind each ``begin`` come ``content`` and ``end``."""
    token = marks.token_of(begin)
    opening = marks.of(begin)
    if token is None and (token := marks.token_within(begin)) is not None:
        opening = sequence(*_elements(opening)[1:])  # what stands before it may be any text
    each = [tag(opening, content, marks.of(end)).format]
    if token is None:
        return Form(
            format={
                "type": "triggered_tags",
                "triggers": [begin],
                "tags": each,
                "excludes": list(without),
            },
            schemas=content.schemas,
        )
    excluded = [found for mark in without if (found := marks.token_of(mark)) is not None]
    return Form(
        format={
            "type": "token_triggered_tags",
            "trigger_tokens": [token],
            "tags": each,
            "exclude_tokens": excluded,
        },
        schemas=content.schemas,
    )


def _elements(form: Form) -> list[Form]:
    """The parts of a sequence without schemas, or what is none."""
    if form.format["type"] != "sequence":
        return [form]
    return [Form(format=element) for element in form.format["elements"]]


def _plain(form: Form) -> object:
    """A text as such, as tags have it."""
    return form.format["value"] if form.format["type"] == "const_string" else form.format


def _joined(kind: str, forms: Iterable[Form]) -> Form:
    forms = list(forms)
    schemas = tuple(schema for form in forms for schema in form.schemas)
    return Form(format={"type": kind, "elements": [form.format for form in forms]}, schemas=schemas)


def _token(token: int) -> Form:
    return Form(format={"type": "token", "token": token})


@dataclass(frozen=True, slots=True)
class MarkForms:
    """The marks of one model: the one token that each is, or its text."""

    table: MarkTable

    def token_of(self, mark: str) -> int | None:
        """The one token that ``mark`` is; None: it is spelled."""
        ids = [token_id for token_id, text in self.table.by_id.items() if text == mark]
        return ids[0] if ids else None

    def token_within(self, mark: str) -> int | None:
        """The control token that ``mark`` holds; None: it holds none."""
        return next((n for n, inner in self.table.inner_by_id.items() if inner in mark), None)

    def of(self, mark: str) -> Form:
        """``mark``."""
        token = self.token_of(mark)
        if token is not None:
            return _token(token)
        within = self.token_within(mark)
        if within is None:
            return text(mark)
        before, _, behind = mark.partition(self.table.inner_by_id[within])
        parts = [text(before) if before else None, _token(within), text(behind) if behind else None]
        return sequence(*filter(None, parts))

    def text_up_to(self, mark: str) -> Form:
        """Text alone: no control token, and no spelling of ``mark`` where that is one."""
        if self.token_of(mark) is not None:
            return matching(r"[\s\S]*")
        within = self.token_within(mark)
        if within is not None:
            first, second = map(re.escape, self.table.inner_by_id[within][:2])
            return matching(f"([^{first}]|{first}+[^{first}{second}])*{first}*")
        return Form(format={"type": "any_text", "excludes": [mark]})

    def all_but(self, mark: str, *, max_tokens: int = 0) -> Form:
        """Any output without ``mark``, of at most ``max_tokens``; 0: of any length."""
        token = self.token_of(mark)
        bound = {"max_tokens": max_tokens} if max_tokens else {}
        if token is None:
            return Form(format={"type": "any_text", "excludes": [mark], **bound})
        return Form(format={"type": "any_tokens", "exclude_tokens": [token], **bound})


def behind_reasoning(form: Form) -> Form:
    """``form`` right behind the mark that ends the reasoning: models write line breaks there."""
    return sequence(matching("\n{0,2}"), form)


def with_reasoning(
    form: Form, reasoning: ReasoningFormat, marks: MarkForms, *, max_tokens: int = 0
) -> Form:
    """``form`` where the model may reason first, with at most ``max_tokens``; 0: as many it likes.

    No grammar of ``form`` begins with the mark that opens the reasoning.
    """
    thought = sequence(
        matching("\n{0,2}"),
        marks.of(reasoning.opening),
        marks.all_but(reasoning.closing, max_tokens=max_tokens),
        marks.of(reasoning.closing),
        matching("\n{0,2}"),
    )
    return sequence(maybe(thought), form)


def anything(reasoning: ReasoningFormat, marks: MarkForms) -> Form:
    """Any output without the mark that opens the reasoning."""
    return marks.all_but(reasoning.opening)
