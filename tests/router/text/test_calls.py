"""Tool calls in every format: found whole, in pieces, cut off, broken, and mere lookalikes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.calls.deepseek import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)
from router.text.calls.dsml import (
    DSML,
    DSML_MARKS,
    INVOKE,
    INVOKE_END,
    MAX_HEAD,
    PARAMETER,
    PARAMETER_END,
)
from router.text.calls.formats import CALL_FORMATS
from router.text.calls.kimi import KIMI_MARKS, kimi_call
from router.text.marks import MarkTable
from tests.router.text.outputs import (
    Message,
    all_marks,
    cut,
    read,
    read_tokens,
    reader_of,
    spelled,
)

FORMATS = sorted(CALL_FORMATS)
WEATHER = {"city": "K\u00f6ln \U0001f642", "days": 3}
DSML_CALLS, DSML_CALLS_END = DSML_MARKS[:2]
REGIONS = {
    "deepseek-v3": ([CALLS_BEGIN], [CALLS_END]),
    "deepseek-v3.1": ([CALLS_BEGIN], [CALLS_END]),
    "deepseek-v3.2": ([DSML_CALLS, "\n"], ["\n", DSML_CALLS_END]),
    "kimi-k2": ([KIMI_MARKS.calls_begin], [KIMI_MARKS.calls_end]),
}
"""What stands around all calls."""
KIMI_CALL, KIMI_ARGUMENTS = KIMI_MARKS.call_begin, KIMI_MARKS.separator


def written(name: str, calls: list[tuple[str, dict[str, object]]]) -> list[str]:
    """``calls`` as a model of the format ``name`` writes them, as marks and texts."""
    begin, end = REGIONS.get(name, ([], []))
    tokens = list(begin)
    for number, (tool, arguments) in enumerate(calls):
        text = json.dumps(arguments, ensure_ascii=False)
        match name:
            case "deepseek-v3":
                tokens += ["\n"] * (number > 0)
                tokens += [CALL_BEGIN, "function", SEPARATOR]
                tokens += [f"{tool}\n```json\n{text}\n```", CALL_END]
            case "deepseek-v3.1":
                tokens += [CALL_BEGIN, tool, SEPARATOR, text, CALL_END]
            case "deepseek-v3.2":
                tokens += ["\n"] * (number > 0) + [INVOKE, f' name="{tool}">\n']
                for key, value in arguments.items():
                    is_text = isinstance(value, str)
                    shown = value if is_text else json.dumps(value, ensure_ascii=False)
                    kind = json.dumps(is_text)
                    tokens += [PARAMETER, f' name="{key}" string="{kind}">', str(shown)]
                    tokens += [PARAMETER_END, "\n"]
                tokens.append(INVOKE_END)
            case "kimi-k2":
                marks = KIMI_MARKS
                tokens += [marks.call_begin, f"functions.{tool}:{number}", marks.separator]
                tokens += [text, marks.call_end]
            case "hermes":
                body = f'\n{{"name": "{tool}", "arguments": {text}}}\n'
                tokens += ["\n"] * (number > 0) + ["<tool_call>", body, "</tool_call>"]
            case "llama3-json":
                tokens += ["; "] * (number > 0)
                tokens.append(f'{{"name": "{tool}", "parameters": {text}}}')
            case "glm-4.5":
                tokens += ["\n"] * (number > 0) + ["<tool_call>", tool, "\n"]
                for key, value in arguments.items():
                    shown = value if isinstance(value, str) else json.dumps(value)
                    tokens += ["<arg_key>", key, "</arg_key>", "\n"]
                    tokens += ["<arg_value>", str(shown), "</arg_value>", "\n"]
                tokens.append("</tool_call>")
    return [*tokens, *end]


def loaded(message: Message) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in message.calls]


VALUES = st.dictionaries(
    st.sampled_from(["city", "days", "other"]),
    st.one_of(st.integers(), st.text(max_size=8), st.lists(st.booleans(), max_size=3), st.none()),
)
CALLS = st.lists(st.tuples(st.sampled_from(["get_weather", "now"]), VALUES), min_size=1, max_size=3)
POINTS = st.lists(st.integers(0, 400), max_size=30)


def as_sent(name: str, calls: list[tuple[str, dict[str, object]]]) -> list[tuple[str, object]]:
    """What a client is to get: GLM's values are told from strings by the schema."""
    if name != "glm-4.5":
        return list(calls)

    def value(tool: str, key: str, given: object) -> object:
        text = given if isinstance(given, str) else json.dumps(given)
        if tool == "get_weather" and key == "city":
            return text
        try:
            return json.loads(text)
        except ValueError:
            return text

    return [
        (tool, {k: value(tool, k, v) for k, v in arguments.items()}) for tool, arguments in calls
    ]


@pytest.mark.parametrize("name", FORMATS)
@given(CALLS, POINTS)
def test_any_cut_gives_the_same_calls(
    name: str, calls: list[tuple[str, dict[str, object]]], points: list[int]
) -> None:
    tokens = written(name, calls)
    if any(mark in str(calls) for mark in all_marks(name)):
        return
    text = "".join(tokens)
    whole = read(reader_of(spelled(name), name), [text])
    assert loaded(whole) == as_sent(name, calls)
    assert whole.content == ""
    assert read(reader_of(spelled(name), name), cut(text, points)) == whole
    assert read(reader_of(spelled(name), name), text) == whole
    assert read_tokens(name, tokens, points) == whole


@pytest.mark.parametrize("name", FORMATS)
@given(st.data(), POINTS)
def test_nothing_that_a_model_writes_is_lost(
    name: str, data: st.DataObject, points: list[int]
) -> None:
    """Any jumble of marks, names and broken JSON: the same however it is cut, and all is said."""
    pieces = [*all_marks(name), "function", "get_weather", "now", "nobody", "\n", " ", "```json\n"]
    pieces += ['{"name": ', '"now"', ', "arguments": ', ', "parameters": ', "{", "}", '"x": 1', "'"]
    pieces += ['{"name": "now", "arguments": {', "; ", "a<b", '"\\', "\u00f6", "city"]
    pieces += [
        ' name="',
        ' name="now">',
        '" string="true">',
        '" string="false">',
        "functions.now:0",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=12)))
    whole = read(reader_of(spelled(name), name), [text])
    assert read(reader_of(spelled(name), name), cut(text, points)) == whole
    assert read(reader_of(spelled(name), name), text) == whole
    if not whole.calls:
        assert whole.content == text
    said = whole.content + "".join(part for call in whole.calls for part in call)
    syntax = {"function", '"name"', '"arguments"', '"parameters"', "```json", *all_marks(name)}
    for word in ("nobody", "a<b", "\u00f6", "city", "get_weather"):
        if name == "llama3-json" or word not in "".join(syntax):
            assert said.count(word) == text.count(word), (said, text)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_keeps_what_was_said(name: str) -> None:
    tokens: list[str] = []
    for token in written(name, [("get_weather", WEATHER)]):
        tokens += [token] if token in all_marks(name) else list(token)
    whole = read_tokens(name, tokens, []).calls[0][1]
    seen = set()
    for end in range(len(tokens)):
        message = read_tokens(name, tokens[:end], [])
        if message.calls:
            ((tool, arguments),) = message.calls
            assert tool == "get_weather"
            if name in ("glm-4.5", "deepseek-v3.2"):  # where half a value is written otherwise
                arguments = arguments.rstrip(' "')
            assert whole.startswith(arguments)
            assert message.content == ""
            seen.add(arguments)
        else:
            assert message.content == "".join(tokens[:end])
    assert len(seen) > 10


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_go_out_while_they_are_written(name: str) -> None:
    reader = reader_of(spelled(name), name)
    text = "".join(written(name, [("get_weather", {"city": "a" * 200})]))
    num_parts = 0
    for char in text:
        reader.tell(-1, 1)
        reader.feed(char)
        num_parts += len(reader.take())
    assert num_parts > 200


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_that_was_not_offered_is_text(name: str) -> None:
    text = "".join(written(name, [("rm", {"path": "/"})]))
    assert read(reader_of(spelled(name), name), [text]) == Message(content=text)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "llama3-json"])
def test_marks_that_are_tokens_are_known_by_their_ids_alone(name: str) -> None:
    """The same letters spelled by other tokens are text: the model talks about calls."""
    text = "".join(written(name, [("get_weather", WEATHER)]))
    table = MarkTable(by_id=dict(enumerate(all_marks(name))))
    assert read(reader_of(table, name), text) == Message(content=text)


@pytest.mark.parametrize(
    ("name", "behind"),
    [
        ("glm-4.5", "<tool_call>now\n{}</tool_call>"),
        ("deepseek-v3.2", f'{INVOKE} name="now">{{}}{INVOKE_END}'),
        ("hermes", '<tool_call>{{"name": "now"}}{}</tool_call>'),
    ],
)
@pytest.mark.parametrize(("stray", "told"), [(" \n ", ""), (" a \n b ", " a \n b ")])
def test_stray_text_in_a_call_is_told_whole_however_it_is_cut(
    name: str, behind: str, stray: str, told: str
) -> None:
    text = behind.format(stray)
    for pieces in ([text], list(text), [text[:-20], text[-20:]]):
        message = read(reader_of(spelled(name), name), pieces)
        assert message == Message(content=told, calls=[["now", "{}"]]), pieces


def test_a_field_behind_the_arguments_takes_no_call_back() -> None:
    text = '{"name": "now", "parameters": {}, "days": 3} and so on'
    for pieces in ([text], list(text), [text[:40], text[40:]]):
        message = read(reader_of(spelled("llama3-json"), "llama3-json"), pieces)
        assert message == Message(content=" and so on", calls=[["now", "{}"]]), pieces


@pytest.mark.parametrize("name", FORMATS)
def test_text_stands_around_calls(name: str) -> None:
    call = "".join(written(name, [("now", {})]))
    if name == "llama3-json":
        message = read(reader_of(spelled(name), name), [call + "\nThat is it."])
        assert message == Message(content="That is it.", calls=[["now", "{}"]])
        text = "I call:\n" + call  # an answer is a call or it is none
        assert read(reader_of(spelled(name), name), [text]) == Message(content=text)
        return
    message = read(reader_of(spelled(name), name), [f"I look.\n\n{call}\nWell.\n"])
    assert message == Message(content="I look.Well.\n", calls=[["now", "{}"]])


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"arguments": {"city": "x"}, "name": "get_weather"}</tool_call>', 1),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "x"}}', 1),
        ("hermes", '<tool_call>{"name":"get_weather","parameters":{"city": "x"}}</tool_call>', 1),
        ("hermes", '<tool_call>{"name": "get_weather"}</tool_call>', 0),
        ("llama3-json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "x"}}', 1),
        ("llama3-json", '\n{"type": "function", "name": "get_weather", "parameters": {}}', 0),
        ("deepseek-v3", f"{CALL_BEGIN}function{SEPARATOR}get_weather\n{CALL_END}", 0),
        ("deepseek-v3", f"{CALL_BEGIN}function{SEPARATOR}get_weather{CALL_END}", 0),
        ("deepseek-v3.1", f'{CALL_BEGIN}get_weather{SEPARATOR}{{"city": "x"}}', 1),
        ("deepseek-v3.2", f'{INVOKE} name="get_weather">\n{INVOKE_END}', 0),
        (
            "deepseek-v3.2",
            f'{DSML_CALLS}\n{INVOKE} name="get_weather">\n{PARAMETER} name="city">x{PARAMETER_END}'
            f"{DSML_CALLS_END}",
            1,
        ),
        ("kimi-k2", f'{KIMI_CALL}get_weather:3{KIMI_ARGUMENTS}{{"city": "x"}}', 1),
        ("kimi-k2", f"{KIMI_CALL} get_weather {KIMI_ARGUMENTS}{KIMI_MARKS.call_end}", 0),
        ("glm-4.5", "<tool_call>get_weather</tool_call>", 0),
    ],
)
def test_variants_that_models_write(name: str, text: str, arguments: int) -> None:
    message = read(reader_of(spelled(name), name), text)
    assert loaded(message) == [("get_weather", {"city": "x"} if arguments else {})]
    assert message.content == ""


@pytest.mark.parametrize(
    "text",
    [
        '{"temperature": 3}',
        '{"name": "now"}',
        '{"name": "now", "age": 3}',
        '{"name": "now", "parameters": 3}',
        '{"name": ["now"], "parameters": {}}',
        "{not json at all",
        "{}",
    ],
)
def test_json_that_is_no_call_is_the_answer(text: str) -> None:
    assert read(reader_of(spelled("llama3-json"), "llama3-json"), text) == Message(content=text)


def test_glm_values_are_what_the_schema_says() -> None:
    text = "<tool_call>get_weather\n<arg_key>city</arg_key><arg_value>12</arg_value>"
    text += "<arg_key>days</arg_key><arg_value> 3 </arg_value><arg_key>x</arg_key></tool_call>"
    message = read(reader_of(spelled("glm-4.5"), "glm-4.5"), text)
    assert loaded(message) == [("get_weather", {"city": "12", "days": 3, "x": None})]


def test_ids_that_kimi_writes_are_its_own() -> None:
    text = "".join(written("kimi-k2", [("now", {}), ("get_weather", {"city": "x"})]))
    for pieces in ([text], text):
        message = read(reader_of(spelled("kimi-k2"), "kimi-k2"), pieces)
        assert message.call_ids == ["functions.now:0", "functions.get_weather:1"]
    other = "".join(written("hermes", [("now", {})]))
    assert read(reader_of(spelled("hermes"), "hermes"), other).call_ids == [None]


@pytest.mark.parametrize(
    ("head", "offered", "name"),
    [
        ("functions.now:0", ["now"], "now"),
        ("functions.a.b-c:12", ["a.b-c", "b-c"], "a.b-c"),
        ("functions.functions.x:0", ["functions.x"], "functions.x"),
        ("functions.x:0", ["functions.x"], "functions.x"),
        ("now", ["now", "then"], "now"),
        ("3", ["now"], "now"),
        ("3", ["now", "then"], None),
        ("", ["now"], None),
        ("functions.nobody:0", ["now"], None),
    ],
)
def test_names_in_kimis_ids(head: str, offered: list[str], name: str | None) -> None:
    call = kimi_call(f" {head} ", {tool: {} for tool in offered})
    assert (call and call.name) == name
    assert call is None or call.call_id == head


@given(st.sampled_from([DSML_CALLS, DSML_CALLS_END, INVOKE, INVOKE_END, PARAMETER, DSML]), POINTS)
def test_a_text_may_spell_all_marks_but_its_own_end(mark: str, points: list[int]) -> None:
    arguments = {"city": f"a{mark}b", "other": [f'{{"{mark}": 1}}']}
    text = "".join(written("deepseek-v3.2", [("get_weather", arguments), ("now", {})]))
    for pieces in ([text], cut(text, points)):
        message = read(reader_of(spelled("deepseek-v3.2"), "deepseek-v3.2"), pieces)
        assert loaded(message) == [("get_weather", arguments), ("now", {})]
        assert message.content == ""


def test_dsml_tags_have_an_end() -> None:
    """However they are cut, what is too long is no tag: its end is not looked for without end."""
    long = f'{INVOKE} name="now"{" " * MAX_HEAD}>\n{INVOKE_END}'
    for pieces in ([long], long):
        reader = reader_of(spelled("deepseek-v3.2"), "deepseek-v3.2")
        assert read(reader, pieces) == Message(content=long)
    text = f'{INVOKE} name="now">\n{PARAMETER} name="{"k" * MAX_HEAD}" string="true">{INVOKE_END}'
    results = [
        read(reader_of(spelled("deepseek-v3.2"), "deepseek-v3.2"), pieces)
        for pieces in ([text], text)
    ]
    assert results[0] == results[1]
    ((name, arguments),) = loaded(results[0])
    assert name == "now"
    assert "k" * MAX_HEAD in str(arguments)


def test_dsml_values_are_what_they_say_they_are() -> None:
    def parameter(key: str, kind: str, value: str) -> str:
        return f'{PARAMETER} name="{key}"{kind}>{value}{PARAMETER_END}\n'

    text = f'{DSML_CALLS}\n{INVOKE} name="get_weather">\n'
    text += parameter("city", "", "12")  # a string, says the schema
    text += parameter("days", "", " 3 ") + parameter("a", ' string="true"', "3")
    text += parameter("b", ' string="false"', '{"x": [null]}') + parameter("c", "", "no JSON")
    text += f'{PARAMETER} name="d"\n{INVOKE_END}\n{DSML_CALLS_END}'
    message = read(reader_of(spelled("deepseek-v3.2"), "deepseek-v3.2"), text)
    values = {"city": "12", "days": 3, "a": "3", "b": {"x": [None]}, "c": "no JSON", "d": None}
    assert loaded(message) == [("get_weather", values)]


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_fills_a_message_that_may_have_one(name: str) -> None:
    reader = reader_of(spelled(name), name, most_calls=1)
    text = "".join(written(name, [("now", {}), ("get_weather", WEATHER)]))
    for char in text:
        reader.tell(-1, 1)
        reader.feed(char)
        if reader.is_full:
            break
    assert reader.is_full
    assert not reader.is_call_open
    reader.feed("more")
    reader.flush()
    assert reader.num_calls == 1
    assert [part.name for part in reader.take() if part.name] == ["now"]
