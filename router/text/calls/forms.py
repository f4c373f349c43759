"""Calls as the models of a format write them, as forms that an output has to follow. Pure.

A form of calls is what the format's parser reads without a doubt, written as the templates write
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grammar.schemas.schema import Canonical
from grammar.schemas.schema_errors import SchemaError, spelled
from router.text.calls.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from router.text.calls.dsml import DSML, DSML_MARKS, INVOKE, INVOKE_END, PARAMETER, PARAMETER_END
from router.text.calls.glm import CLOSING, KEY, KEY_END, OPENING, VALUE, VALUE_END
from router.text.calls.json_call import HERMES_MARKS
from router.text.calls.kimi import KIMI_MARKS, PREFIX
from router.text.grammar.forms import (
    Form,
    MarkForms,
    any_number,
    json_of,
    json_of_canonical,
    matching,
    maybe,
    one_of,
    sequence,
    tag,
    tags,
    text,
    triggered,
)

_COUNTS = ("minProperties", "maxProperties")
_OF_OTHERS = ("propertyNames", "patternProperties", "additionalProperties")
"""Of objects whose properties have no names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """One tool that may be called."""

    name: str
    param: str
    """The field that holds the schema of its arguments."""
    arguments: Canonical
    """That schema; of ``objects_of``."""

    @property
    def left_out(self) -> list[str]:
        """Fields that are not followed."""
        return [self.param + spelled(path) for path in self.arguments.left_out]

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The schemas of which the arguments follow one."""
        assert isinstance(self.arguments.schema, dict)
        found: list[dict[str, Any]] = self.arguments.schema.get("anyOf", [self.arguments.schema])
        return found

    @property
    def is_union(self) -> bool:
        """Whether clients wrote a union or a reference for the whole of the arguments."""
        return isinstance(self.arguments.schema, dict) and "anyOf" in self.arguments.schema

    @property
    def json(self) -> Form:
        """The arguments as JSON."""
        return json_of_canonical(self.arguments, self.param)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """How calls of one format are put together."""

    begin: str
    """Of a call."""
    content: Callable[[ToolForm, MarkForms], Form]
    end: str
    separator: str = ""
    """Between two calls."""
    region: tuple[str, str] | None = None
    """What stands around all calls."""
    within_region: str = ""
    """Between that and the calls."""
    by_key: bool = False
    """Whether arguments are written one by one, and not as a JSON object."""
    is_marked: bool = True
    """Whether a begin is a mark; else it is text with ``NAME`` for the tool's name."""

    def calls(self, tools: Sequence[ToolForm], marks: MarkForms, *, only_one: bool) -> Form:
        """At least one call of one of ``tools``."""
        each = [
            tag(
                marks.of(self.begin) if self.is_marked else text(_named(self.begin, tool)),
                self.content(tool, marks),
                marks.of(self.end) if self.is_marked else text(self.end),
            )
            for tool in tools
        ]
        if self.region is None:
            return tags(each, self.separator, only_one=only_one)
        begin, end = self.region
        return sequence(marks.of(begin), self._inside(each, only_one=only_one), marks.of(end))

    def _inside(self, each: Sequence[Form], *, only_one: bool) -> Form:
        """All between the marks of the region."""
        form = tags(each, self.separator, only_one=only_one)
        if not self.within_region:
            return form
        return sequence(text(self.within_region), form, text(self.within_region))

    def within_text(
        self, tools: Sequence[ToolForm], marks: MarkForms, *, without: Sequence[str] = ()
    ) -> Form | None:
        """Any text, in which what begins as a call is one; None: a beginning may be text, too.

        ``without``: marks that stand nowhere in it.
        """
        if not self.is_marked:
            return None
        if self.region is None:
            contents = one_of([self.content(tool, marks) for tool in tools])
            return triggered(marks, self.begin, contents, self.end, without=without)
        each = [
            tag(marks.of(self.begin), self.content(tool, marks), marks.of(self.end))
            for tool in tools
        ]
        begin, end = self.region
        inside = self._inside(each, only_one=False)
        return triggered(marks, begin, inside, end, without=without)


def written_by_key(found: Canonical, *, lenient: bool) -> Canonical:
    """``found``, of ``objects_of``, without what calls cannot follow that write keys one by one.

    ``lenient``: leave that out, instead of refusing it.

    Raises:
        SchemaError: there is such a thing.
    """
    assert isinstance(found.schema, dict)
    unsaid = {
        name: None
        for schema in found.schema.get("anyOf", [found.schema])
        for name in (*_COUNTS, *(() if "properties" in schema else _OF_OTHERS))
        if name in schema and (name == "maxProperties" or schema[name] not in (False, {}))
    }
    if unsaid and not lenient:
        problem = "is not followed by this model's calls. Fix: leave it out"
        raise SchemaError((next(iter(unsaid)),), problem)
    return replace(found, left_out=(*found.left_out, *((name,) for name in unsaid)))


def _named(template: str, tool: ToolForm) -> str:
    return template.replace("NAME", tool.name)


def _deepseek_v3(tool: ToolForm, marks: MarkForms) -> Form:
    head = text(f"{tool.name}\n```json\n")
    return sequence(text("function"), marks.of(SEPARATOR), head, tool.json, text("\n```"))


def _deepseek_v31(tool: ToolForm, marks: MarkForms) -> Form:
    return sequence(text(tool.name), marks.of(SEPARATOR), tool.json)


def _hermes(tool: ToolForm, marks: MarkForms) -> Form:
    return sequence(text(f'\n{{"name": "{tool.name}", "arguments": '), tool.json, text("}\n"))


def _llama(tool: ToolForm, marks: MarkForms) -> Form:
    return tool.json


def _kimi(tool: ToolForm, marks: MarkForms) -> Form:
    call_id = sequence(text(f"{PREFIX}{tool.name}:"), matching("0|[1-9][0-9]{0,2}"))
    return sequence(call_id, marks.of(KIMI_MARKS.separator), tool.json)


def _glm(tool: ToolForm, marks: MarkForms) -> Form:
    def field(key: Form, content: Form) -> Form:
        opened = sequence(marks.of(KEY), key, marks.of(KEY_END), text("\n"), marks.of(VALUE))
        return sequence(opened, content, marks.of(VALUE_END), text("\n"))

    def known(name: str, value: Any) -> Form:
        if not name.strip() or "<" in name:
            raise _unfit(name)
        # Of what is no union here, the parser of calls knows which values are texts.
        plain = None if tool.is_union else _plain_text(value, VALUE_END, marks)
        return field(text(name), plain or _json_value(tool, name, value))

    other = field(matching(r"[^<\s]([^<\n]*[^<\s])?"), marks.text_up_to(VALUE_END))
    return _fields(text(f"{tool.name}\n"), tool, known, other)


def _dsml(tool: ToolForm, marks: MarkForms) -> Form:
    def field(name: Form, content: Form, *, is_string: bool) -> Form:
        kind = text(f'" string="{str(is_string).lower()}">')
        head = sequence(marks.of(PARAMETER), text(' name="'), name, kind)
        return sequence(head, content, sequence(marks.of(PARAMETER_END), text("\n")))

    def known(name: str, value: Any) -> Form:
        if '"' in name or DSML in name:
            raise _unfit(name)
        plain = _plain_text(value, PARAMETER_END, marks)
        content = plain or _json_value(tool, name, value)
        return field(text(name), content, is_string=plain is not None)

    name, anything = matching(f'[^"{DSML[0]}]{{1,64}}'), json_of({}, tool.param)
    texts = field(name, marks.text_up_to(PARAMETER_END), is_string=True)
    other = one_of([texts, field(name, anything, is_string=False)])
    return _fields(text(f' name="{tool.name}">\n'), tool, known, other)


def _fields(head: Form, tool: ToolForm, known: Callable[[str, Any], Form], other: Form) -> Form:
    """Behind ``head``, arguments in the order of the schema, for calls that write them one by one.

    ``other``: an argument of which no schema says anything.
    """
    return one_of([sequence(head, *_of_object(each, known, other)) for each in tool.objects])


def _of_object(
    schema: Mapping[str, Any], known: Callable[[str, Any], Form], other: Form
) -> list[Form]:
    required = schema.get("required", ())
    if "properties" not in schema:
        return [] if schema.get("additionalProperties") is False else [any_number(other)]
    fields = []
    for name, value in schema["properties"].items():
        if value is False:
            if name in required:
                raise SchemaError(("properties", name), "is required, and has no value")
            continue
        form = known(name, value)
        fields.append(form if name in required else maybe(form))
    return fields


def _unfit(name: str) -> SchemaError:
    return SchemaError(("properties", name), "has a name that this model's calls cannot have")


def _plain_text(value: Any, end: str, marks: MarkForms) -> Form | None:
    """A value that is written without JSON's quotes; None: it is written as JSON."""
    if isinstance(value, dict) and dict(value) == {"type": "string"}:
        return marks.text_up_to(end)
    if isinstance(value, dict) and _are_strings(value.get("enum")):
        return one_of([text(item) for item in value["enum"]])
    return None


def _json_value(tool: ToolForm, name: str, value: Any) -> Form:
    defs = tool.arguments.schema.get("$defs") if isinstance(tool.arguments.schema, dict) else {}
    inner: Mapping[str, Any] = {**value, "$defs": defs} if defs else value
    found = Canonical(schema=dict(inner), left_out=())
    return json_of_canonical(found, f"{tool.param}.properties.{name}")


def _are_strings(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


DEEPSEEK_V3 = CallShape(
    begin=CALL_BEGIN,
    content=_deepseek_v3,
    end=CALL_END,
    separator="\n",
    region=(CALLS_BEGIN, CALLS_END),
)
DEEPSEEK_V31 = CallShape(
    begin=CALL_BEGIN, content=_deepseek_v31, end=CALL_END, region=(CALLS_BEGIN, CALLS_END)
)
DEEPSEEK_V32 = CallShape(
    begin=INVOKE,
    content=_dsml,
    end=INVOKE_END,
    separator="\n",
    region=DSML_MARKS[:2],
    within_region="\n",
    by_key=True,
)
GLM = CallShape(begin=OPENING, content=_glm, end=CLOSING, separator="\n", by_key=True)
HERMES = CallShape(begin=HERMES_MARKS[0], content=_hermes, end=HERMES_MARKS[1], separator="\n")
KIMI = CallShape(
    begin=KIMI_MARKS.call_begin,
    content=_kimi,
    end=KIMI_MARKS.call_end,
    region=(KIMI_MARKS.calls_begin, KIMI_MARKS.calls_end),
)
LLAMA = CallShape(
    begin='{"name": "NAME", "parameters": ',
    content=_llama,
    end="}",
    separator="; ",
    is_marked=False,
)
