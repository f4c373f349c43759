"""What a model can write that has to call: calls that the format's own parser reads, no less."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from grammar.schemas.schema import canonical, objects_of
from grammar.schemas.schema_errors import SchemaError
from router.text.calls.dsml import DSML
from router.text.calls.formats import CALL_FORMATS
from router.text.calls.forms import ToolForm, written_by_key
from router.text.grammar.forms import (
    Form,
    MarkForms,
    anything,
    behind_reasoning,
    json_of,
    one_of,
    with_reasoning,
)
from router.text.marks import MarkTable
from router.text.reasoning import Start
from tests.grammar.writer import FIRST_MARK, Writer
from tests.router.text.outputs import THINK, Message, all_marks, read, reader_of, spelled

FORMATS = sorted(CALL_FORMATS)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "more": {"$ref": "#/$defs/More"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"More": {"type": "object", "properties": {"a": {"type": "null"}}}},
}
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}}
TOOLS = [
    ToolForm(name=name, param=f"tools[{n}]", arguments=canonical(schema, closed=True))
    for n, (name, schema) in enumerate(SCHEMAS.items())
]


# Whoever writes at random never spells a mark, so a text that a mark ends goes on for ever.
BOUNDED = [
    ToolForm(
        name=tool.name,
        param=tool.param,
        arguments=canonical(
            {**SCHEMAS[tool.name], "properties": {**WEATHER["properties"], "city": {"const": "K"}}}
            if tool.name == "get_weather"
            else SCHEMAS[tool.name],
            closed=True,
        ),
    )
    for tool in TOOLS
]


def by_id(name: str) -> MarkTable:
    """Every mark is one token."""
    return MarkTable(
        by_id={FIRST_MARK + n: mark for n, mark in enumerate(all_marks(name))}, spelled=()
    )


def read_output(
    name: str, table: MarkTable, output: list[int], start: Start | None, **options: Any
) -> Message:
    """What a client has of ``output``, of bytes and marks."""
    reader = reader_of(table, name, start, **options)
    if not table.by_id:
        return read(reader, [bytes(output).decode(errors="replace")])
    parts, run = [], bytearray()
    for token in [*output, None]:
        if token is None or token in table.by_id:
            parts.append((-1, run.decode(errors="replace")))
            run = bytearray()
            if token is not None:
                parts.append((token, table.by_id[token]))
        else:
            run.append(token)
    for token, text in parts:
        reader.tell(token, len(text))
        reader.feed(text)
    return read(reader, [])


def check_calls(message: Message) -> None:
    for name, arguments in message.calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("tables", [by_id, spelled], ids=["tokens", "spelled"])
@pytest.mark.parametrize("only_one", [True, False], ids=["one", "several"])
@pytest.mark.parametrize("name", FORMATS)
def test_whoever_has_to_call_calls(name: str, only_one: bool, tables: Any) -> None:
    table = tables(name)
    tools = TOOLS if table.by_id else BOUNDED
    form = CALL_FORMATS[name].shape.calls(tools, MarkForms(table), only_one=only_one)
    writer, rng = Writer(form), random.Random(3)
    nums, names = set(), set()
    for _ in range(40):
        output = writer.write(rng)
        if output is None:
            continue
        message = read_output(name, table, output, None)
        assert message.content == ""
        check_calls(message)
        nums.add(len(message.calls))
        names |= {call[0] for call in message.calls}
    assert names == set(SCHEMAS)
    assert (max(nums) == 1) is only_one


def test_calls_are_written_as_templates_write_them() -> None:
    arguments = '{"city": "K\u00f6ln", "unit": "C"}'
    marks = by_id("hermes")
    begin, end = (MarkForms(marks).token_of(m) for m in CALL_FORMATS["hermes"].marks)
    shape = CALL_FORMATS["hermes"].shape
    writer = Writer(shape.calls(TOOLS, MarkForms(marks), only_one=False))
    call = [begin, f'\n{{"name": "get_weather", "arguments": {arguments}}}\n', end]
    assert writer.takes(call)
    assert writer.takes([*call, "\n", *call])
    assert not writer.takes([*call, "\n"])
    assert not writer.takes(["x", *call])
    assert not writer.takes(
        ['<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>']
    )  # letters are no mark


@pytest.mark.parametrize("tables", [by_id, spelled], ids=["tokens", "spelled"])
@pytest.mark.parametrize("name", [name for name in FORMATS if CALL_FORMATS[name].shape.is_marked])
def test_within_text_only_calls_are_bound(name: str, tables: Any) -> None:
    table = tables(name)
    marks = MarkForms(table)
    shape = CALL_FORMATS[name].shape
    form = shape.within_text(TOOLS, marks)
    assert form is not None
    writer = Writer(form)
    assert writer.takes("just text {")
    mark = (shape.region or (shape.begin,))[0]
    begin = marks.token_of(mark)
    opening: int | str = mark if begin is None else begin
    assert not writer.takes(["text ", opening, "more text"])
    whole = Writer(shape.calls(BOUNDED, marks, only_one=True)).write(random.Random(1))
    assert whole is not None
    assert writer.takes(["text ", *whole])


@pytest.mark.parametrize("tables", [by_id, spelled], ids=["tokens", "spelled"])
@pytest.mark.parametrize("name", ["glm-4.5", "deepseek-v3.2"])
@pytest.mark.parametrize(
    "bound", [{"pattern": "^[a-z]{2,5}$"}, {"maxLength": 3}, {"const": "K"}, {"enum": ["K", "L"]}]
)
def test_a_string_that_is_bound_is_one_string(
    name: str, bound: dict[str, Any], tables: Any
) -> None:
    """Though it is written as JSON, since its grammar is one of JSON."""
    value = {"type": "string", **bound}
    schema = {"type": "object", "properties": {"city": value}, "required": ["city"]}
    tool = ToolForm(name="f", param="x", arguments=canonical(schema, closed=True))
    table = tables(name)
    writer = Writer(CALL_FORMATS[name].shape.calls([tool], MarkForms(table), only_one=True))
    for seed in range(5):
        output = writer.write(random.Random(seed))
        assert output is not None
        ((_, arguments),) = read_output(name, table, output, None, offered={"f": schema}).calls
        jsonschema.validate(json.loads(arguments), schema)


def test_a_control_token_within_a_mark_is_that_token() -> None:
    """DSML's tags are spelled around one: forced calls hold it, not its letters."""
    name, dsml = "deepseek-v3.2", FIRST_MARK
    table = MarkTable(by_id={}, spelled=all_marks(name), inner_by_id={dsml: DSML})
    marks, shape = MarkForms(table), CALL_FORMATS[name].shape

    def tagged(text: str) -> list[int | str]:
        """With the token for every spelling of it."""
        parts: list[int | str] = []
        for piece in text.split(DSML):
            parts += [dsml, piece] if parts else [piece]
        return parts

    call = f'<{DSML}invoke name="get_weather">\n'
    call += f'<{DSML}parameter name="city" string="true">K\u00f6ln</{DSML}parameter>\n'
    call += f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n'
    call += f'<{DSML}parameter name="unit" string="true">C</{DSML}parameter>\n</{DSML}invoke>'
    text = f"<{DSML}function_calls>\n{call}\n</{DSML}function_calls>"
    forced = Writer(shape.calls(TOOLS, marks, only_one=True))
    assert forced.takes(tagged(text))
    assert not forced.takes(text)
    assert not forced.takes(tagged(text.replace("3<", "0<")))
    several = Writer(shape.calls(TOOLS, marks, only_one=False))
    assert several.takes(tagged(text.replace(call, f"{call}\n{call}")))
    form = shape.within_text(TOOLS, marks)
    assert form is not None
    assert Writer(form).takes(["I look.\n\n", *tagged(text)])
    assert not Writer(form).takes(["I look.\n\n", *tagged(text.replace(">C<", ">K<"))])
    assert not Writer(form).takes(tagged(f"<{DSML}function_calls>\nmore text"))


def test_kimis_calls_are_counted() -> None:
    marks = by_id("kimi-k2")
    ids = {mark: token for token, mark in marks.by_id.items()}
    begin, call, arguments, end_call, end = (ids[mark] for mark in CALL_FORMATS["kimi-k2"].marks)
    writer = Writer(CALL_FORMATS["kimi-k2"].shape.calls(TOOLS, MarkForms(marks), only_one=False))
    for number, takes in (("0", True), ("17", True), ("", False), ("x", False)):
        one = [call, f"functions.now:{number}", arguments, "{}", end_call]
        assert writer.takes([begin, *one, *one, end]) is takes


def test_without_marks_text_cannot_be_told_from_calls() -> None:
    shape = CALL_FORMATS["llama3-json"].shape
    assert shape.within_text(TOOLS, MarkForms(by_id("llama3-json"))) is None


def test_a_document_or_a_call() -> None:
    marks = MarkForms(by_id("llama3-json"))
    calls = CALL_FORMATS["llama3-json"].shape.calls(TOOLS, marks, only_one=True)
    document = json_of(
        {"type": "object", "properties": {"a": {"type": "integer"}}}, "x", closed=True
    )
    writer = Writer(one_of([calls, document]))
    assert writer.takes('{"a": 1}')
    assert writer.takes('{"name": "now", "parameters": {}}')
    assert not writer.takes('{"name": "now"}')


NODE = {"a": {"type": "string", "maxLength": 3}, "next": {"$ref": "#/$defs/Node"}}
COUNT = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
UNIONS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (
        {
            "$ref": "#/$defs/Node",
            "$defs": {"Node": {"type": "object", "properties": NODE, "required": ["a"]}},
        },
        [{"a": "12"}, {"a": "x", "next": {"a": "y"}}],
    ),
    (
        {
            "anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}, {"oneOf": [False, {"$ref": "#"}]}],
            "$defs": {"n": COUNT},
        },
        [{"n": 7}],
    ),
    ({"enum": ["x", {}, {"a": 1, "b": ["c"]}]}, [{}, {"a": 1, "b": ["c"]}]),
    ({"type": ["string", "object"], "properties": {"a": {"type": "null"}}}, [{}, {"a": None}]),
]
"""Arguments of which not all are objects at first sight, and some that are."""


def written(name: str, arguments: dict[str, Any], table: MarkTable) -> list[int | str]:
    """A call of ``f`` in a format that writes keys one by one, each value as JSON."""
    if name == "glm-4.5":
        fields = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{json.dumps(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        text = f"<tool_call>f\n{fields}</tool_call>"
    else:
        fields = "".join(
            f'<{DSML}parameter name="{key}" string="false">{json.dumps(value)}</{DSML}parameter>\n'
            for key, value in arguments.items()
        )
        call = f'<{DSML}invoke name="f">\n{fields}</{DSML}invoke>'
        text = f"<{DSML}function_calls>\n{call}\n</{DSML}function_calls>"
    ids = {mark: token for token, mark in table.by_id.items()}
    found = re.split(f"({'|'.join(map(re.escape, ids))})", text)
    return [ids.get(part, part) for part in found if part]


@pytest.mark.parametrize(("schema", "documents"), UNIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_objects_whatever_their_schema_lets_in(
    name: str, schema: dict[str, Any], documents: list[dict[str, Any]]
) -> None:
    tool = ToolForm(name="f", param="x", arguments=objects_of(canonical(schema)))
    table, shape = by_id(name), CALL_FORMATS[name].shape
    writer = Writer(shape.calls([tool], MarkForms(table), only_one=True))
    for document in documents if shape.by_key else []:
        assert writer.takes(written(name, document, table)), document
    finished = 0
    for seed in range(6):
        output = writer.write(random.Random(seed))
        if output is not None:
            found = read_output(name, table, output, None, offered={"f": schema})
            ((_, arguments),) = found.calls
            assert isinstance(json.loads(arguments), dict)
            jsonschema.validate(json.loads(arguments), schema)
            finished += 1
    assert finished


@pytest.mark.parametrize("schema", [{"anyOf": [False, {"type": "null"}]}, False, {"enum": ["a"]}])
def test_arguments_that_are_no_object_are_refused(schema: Any) -> None:
    with pytest.raises(SchemaError, match="lets in no object"):
        objects_of(canonical(schema))


@pytest.mark.parametrize("name", ["glm-4.5", "deepseek-v3.2"])
def test_keys_that_no_schema_names_may_be_any(name: str) -> None:
    table, shape = by_id(name), CALL_FORMATS[name].shape

    def writer_of(schema: dict[str, Any]) -> Writer:
        tool = ToolForm(name="f", param="x", arguments=objects_of(canonical(schema)))
        return Writer(shape.calls([tool], MarkForms(table), only_one=True))

    open_one, closed = writer_of({"type": "object"}), writer_of({"additionalProperties": False})
    for document in ({}, {"a": 1}, {"a b": ["x"], "c": {"d": None}}):
        assert open_one.takes(written(name, document, table))
        assert closed.takes(written(name, document, table)) is (not document)
        output = open_one.write(random.Random(len(document)))
        assert output is not None
        ((_, arguments),) = read_output(name, table, output, None, offered={"f": {}}).calls
        assert isinstance(json.loads(arguments), dict)


def test_what_calls_by_key_cannot_follow_is_left_out_or_refused() -> None:
    for schema, name in (
        ({"properties": {"a": {}}, "minProperties": 1}, "minProperties"),
        ({"properties": {"a": {}}, "maxProperties": 0, "minProperties": 0}, "maxProperties"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "additionalProperties"),
        ({"anyOf": [{"type": "object"}, {"propertyNames": {"maxLength": 3}}]}, "propertyNames"),
    ):
        found = objects_of(canonical(schema))
        assert written_by_key(found, lenient=True).left_out == ((name,),)
        with pytest.raises(SchemaError, match="is not followed") as caught:
            written_by_key(found, lenient=False)
        assert caught.value.path == (name,)
    plain = objects_of(
        canonical({"properties": {"a": {}}, "additionalProperties": {"type": "null"}})
    )
    assert written_by_key(plain, lenient=False) == plain


@pytest.mark.parametrize("name", ["glm-4.5", "deepseek-v3.2"])
def test_a_name_that_a_format_cannot_write_is_refused(name: str) -> None:
    key = {"glm-4.5": "a<b", "deepseek-v3.2": 'a"b'}[name]
    schema = {"type": "object", "properties": {key: {"type": "string"}}}
    tool = ToolForm(name="f", param="x", arguments=canonical(schema))
    with pytest.raises(SchemaError, match="a name that"):
        CALL_FORMATS[name].shape.calls([tool], MarkForms(by_id(name)), only_one=True)


def test_a_key_that_may_not_be_there_is_not_written() -> None:
    schema = {"type": "object", "properties": {"a": False, "b": {"type": "null"}}}
    shape, marks = CALL_FORMATS["glm-4.5"].shape, MarkForms(by_id("glm-4.5"))
    tool = ToolForm(name="f", param="x", arguments=canonical(schema))
    output = Writer(shape.calls([tool], marks, only_one=True)).write(random.Random(1))
    assert output is not None
    assert b"a" not in bytes(token for token in output if token < FIRST_MARK)
    tool = ToolForm(name="f", param="x", arguments=canonical({**schema, "required": ["a"]}))
    with pytest.raises(SchemaError, match="no value"):
        shape.calls([tool], marks, only_one=True)


OPEN, CLOSE = FIRST_MARK, FIRST_MARK + 1


@pytest.mark.parametrize("tables", [by_id, spelled], ids=["tokens", "spelled"])
def test_reasoning_may_come_first(tables: Any) -> None:
    table = tables("hermes")
    opening: int | str = OPEN if table.by_id else THINK.opening
    closing: int | str = CLOSE if table.by_id else THINK.closing
    marks = MarkForms(table)
    answer: Form = json_of({"type": "integer"}, "x")
    writer = Writer(with_reasoning(answer, THINK, marks))
    assert writer.takes("12")
    assert writer.takes([opening, "any {thing", closing, "\n\n12"])
    assert writer.takes(["\n", opening, "\n", closing, "12"])
    assert not writer.takes([opening, "any {thing", closing, "\n\nx"])
    assert not writer.takes([opening, "12"])
    assert Writer(behind_reasoning(answer)).takes("\n\n12")
    assert not Writer(behind_reasoning(answer)).takes("\n\n\n12")


def test_reasoning_has_a_budget() -> None:
    marks = MarkForms(by_id("hermes"))
    writer = Writer(with_reasoning(json_of({"type": "integer"}, "x"), THINK, marks, max_tokens=3))
    assert writer.takes([OPEN, "abc", CLOSE, "1"])
    assert not writer.takes([OPEN, "abcd", CLOSE, "1"])


@pytest.mark.parametrize("tables", [by_id, spelled], ids=["tokens", "spelled"])
def test_a_budget_holds_without_a_form_of_the_answer(tables: Any) -> None:
    table = tables("hermes")
    opening: int | str = OPEN if table.by_id else THINK.opening
    closing: int | str = CLOSE if table.by_id else THINK.closing
    marks = MarkForms(table)
    writer = Writer(with_reasoning(anything(THINK, marks), THINK, marks, max_tokens=3))
    assert writer.takes("no thought at all")
    assert writer.takes("")
    assert writer.takes([opening, "abc", closing, "the answer"])
    assert not writer.takes([opening, "abcd", closing, "the answer"])
