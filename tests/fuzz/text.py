"""Targets: what models write, what clients send as patterns and schemas, and chat templates."""

from __future__ import annotations

from functools import partial

import orjson

from grammar.schemas.documents import document_rules
from grammar.schemas.ebnf import Rules
from grammar.schemas.pattern import Pattern, check_pattern
from grammar.schemas.schema import canonical
from grammar.schemas.schema_errors import SchemaError, spelled
from router.errors import RequestError
from router.text.calls.deepseek import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)
from router.text.calls.dsml import DSML_MARKS, INVOKE, INVOKE_END, PARAMETER, PARAMETER_END
from router.text.calls.formats import CALL_FORMATS
from router.text.calls.kimi import KIMI_MARKS
from router.text.grammar.forms import is_guarded, json_of_canonical
from router.text.reasoning import Start
from router.text.stops import StopStrings
from router.text.template import ChatTemplate
from router.text.template_environment import MAX_CHARS
from router.text.template_probe import describe_template
from runtime.errors import ConfigError
from tests.fuzz.target import Target
from tests.router.text.outputs import OFFERED, all_marks, cut, read, reader_of
from tests.router.text.outputs import spelled as marks_of

MAX_RULES = 2**22
"""Bytes of a grammar that a schema of a few kilobytes may become."""
_STARTS = (None, Start.CLOSED, Start.UNDECIDED, Start.OPEN)


def calls(name: str, data: bytes) -> None:
    """An output is the same message however it is cut.

    The first byte says how it begins and ends, the next four where it is cut.
    """
    head, text = data[:5].ljust(5, b"\0"), data[5:].decode(errors="replace")
    start = _STARTS[head[0] % len(_STARTS)]
    is_cut = bool(head[0] & 4)
    whole = read(reader_of(marks_of(name), name, start), [text], is_cut=is_cut)
    for pieces in (cut(text, head[1:]), list(text)):
        found = read(reader_of(marks_of(name), name, start), pieces, is_cut=is_cut)
        assert found == whole, f"{pieces}: {found}, in one piece {whole}"
        assert found.call_ids == whole.call_ids
    assert {called for called, _ in whole.calls} <= set(OFFERED)


def stops(data: bytes) -> None:
    """A text stops at the same place however it is cut."""
    first, _, rest = data.decode(errors="replace").partition("\n")
    strings = [stop for stop in first.split("|") if stop]

    def read_text(pieces: list[str]) -> tuple[str, str | None]:
        watch, found = StopStrings(strings), ""
        for piece in pieces:
            result = watch.feed(piece)
            found += result.text
            if result.stopped is not None:
                return found, result.stopped
        return found + watch.flush(), None

    whole = read_text([rest])
    assert read_text(list(rest)) == whole
    if whole[1] is None:
        assert whole[0] == rest


def patterns(data: bytes) -> None:
    """A pattern becomes rules of a bounded size, or is refused."""
    pattern = data.decode(errors="replace")
    check_pattern(pattern)
    rules = Rules()
    text = rules.text(Pattern(rules).symbol(pattern))
    assert text is None or len(text) <= MAX_RULES, len(text)


def schemas(data: bytes) -> None:
    """A schema becomes rules of a bounded size; what cannot be followed is named by its place."""
    try:
        schema = orjson.loads(data)
    except orjson.JSONDecodeError:
        return
    for closed, lenient in ((False, True), (True, False)):
        try:
            found = canonical(schema, closed=closed, lenient=lenient)
        except SchemaError as error:
            spelled(error.path)
            continue
        is_guarded(None, json_of_canonical(found, "schema"))
        text = document_rules(found.schema, is_compact=closed)
        assert text is None or len(text) <= MAX_RULES, len(text)


_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
_TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f"}}]},
]


def templates(data: bytes) -> None:
    """A template writes a bounded text, or says why not."""
    template = ChatTemplate(data.decode(errors="replace"), _TOKENS)
    describe_template(template)
    text = template.render(_TALK, tools=[{"function": {"name": "f"}}], extra={"thinking": True})
    assert len(text) <= MAX_CHARS


def _written(name: str) -> tuple[bytes, ...]:
    """Two outputs of a format: text and calls, and the calls of a model that reasons."""
    marks = "".join(CALL_FORMATS[name].marks)
    call = _CALLS[name]
    texts = (f"Hello. {call}", f"<think>so</think>{call}{call}", f"so {call}</think>{marks}")
    return tuple(bytes([n, 3, 9, 40, 99]) + text.encode() for n, text in enumerate(texts, start=1))


_WEATHER = '{"city": "K\u00f6ln", "days": 3}'
_KIMI = KIMI_MARKS
_CALLS = {
    "deepseek-v3": f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}get_weather\n```json\n"
    f"{_WEATHER}\n```{CALL_END}{CALLS_END}",
    "deepseek-v3.1": f"{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEPARATOR}{_WEATHER}{CALL_END}"
    f"{CALLS_END}",
    "deepseek-v3.2": f'{DSML_MARKS[0]}\n{INVOKE} name="get_weather">\n'
    f'{PARAMETER} name="city" string="true">K\u00f6ln{PARAMETER_END}\n'
    f'{PARAMETER} name="days" string="false">3{PARAMETER_END}\n{INVOKE_END}\n{DSML_MARKS[1]}',
    "glm-4.5": "<tool_call>get_weather\n<arg_key>city</arg_key>\n"
    "<arg_value>K\u00f6ln</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    "</tool_call>",
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {_WEATHER}}}\n</tool_call>',
    "kimi-k2": f"{_KIMI.calls_begin}{_KIMI.call_begin}functions.get_weather:0{_KIMI.separator}"
    f"{_WEATHER}{_KIMI.call_end}{_KIMI.calls_end}",
    "llama3-json": f'{{"name": "get_weather", "parameters": {_WEATHER}}}; ',
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[a-z]{2,5}$"},
        "b": {"type": "integer", "minimum": -3, "multipleOf": 7},
        "c": {"anyOf": [{"enum": [1, "x", None]}, {"$ref": "#/$defs/n"}]},
        "d": {"type": "array", "items": {"type": "number", "exclusiveMaximum": 0.5}, "maxItems": 3},
    },
    "required": ["a", "e"],
    "additionalProperties": {"format": "date"},
    "$defs": {"n": {"type": "object", "patternProperties": {"^x": {}}, "minProperties": 1}},
}
_KEYWORDS = (
    *("type", "enum", "const", "$ref", "#/$defs/n", "#", "properties", "required", "items"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "patternProperties"),
    *("prefixItems", "additionalItems", "pattern", "format", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems"),
    *("maxItems", "minProperties", "maxProperties", "anyOf", "oneOf", "allOf", "not", "if"),
    *("string", "number", "integer", "boolean", "object", "array", "null", "date-time", "uuid"),
)
_OF_TEMPLATES = (
    *("{%", "%}", "{{", "}}", "{#", "for", "endfor", "if", "endif", "set", "macro", "endmacro"),
    *("messages", "tools", "loop.index", "namespace(", "raise_exception(", "strftime_now("),
    *("tojson", "join(", "replace(", "center(", "format(", "range(", "**", "~", "generation"),
)

TARGETS = {
    **{
        f"calls-{name}": Target(
            run=partial(calls, name),
            seeds=_written(name),
            words=(*all_marks(name), "get_weather", '"name": "', "functions.", "```json\n"),
        )
        for name in CALL_FORMATS
    },
    "stops": Target(run=stops, seeds=(b"END|aba\nxx abab EN END",)),
    "patterns": Target(
        run=patterns,
        refusals=(ValueError,),
        seeds=(rb"^(?:a|[^b-d]{2,9})*\d+(?<n>\w?)$", rb"((a+)?b{3,}|\x41\u0042)"),
        words=("(?:", "(?<n>", "{1000}", "{2,}", "[^", "\\d", "\\b", "\\u00e9", "(?=", "\\1", "^$"),
    ),
    "schemas": Target(
        run=schemas, seeds=(orjson.dumps(_SCHEMA), b"true"), words=_KEYWORDS, is_json=True
    ),
    "templates": Target(
        run=templates,
        refusals=(ConfigError, RequestError),
        seeds=(
            b"{% for m in messages %}{{ m.role ~ m.content | tojson }}{% endfor %}",
            b"{% set n = namespace(x=1) %}{{ '%5d' | format(n.x) }}{{ raise_exception('x') }}",
            b"{% macro f(x) %}{{ x * 2 }}{% endmacro %}"
            b"{% generation %}{{ f('a') }}{% endgeneration %}",
        ),
        words=_OF_TEMPLATES,
    ),
}
