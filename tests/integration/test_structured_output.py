"""The bundled model answers as it is asked to, through prefill and decode: every output parses.

It has never learnt JSON, so nothing but the grammars makes it write any.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, Field

from router.text.tokenizer import Tokenizer
from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from tests.integration.cluster import Cluster
from tests.integration.test_messages import folder

if TYPE_CHECKING:
    import anthropic
    import openai

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
__all__ = ["folder"]  # the fixture
MESSAGES = [{"role": "user", "content": "def fibonacci(n):"}]
REQUEST: dict[str, Any] = {"model": "tandem-python", "messages": MESSAGES, "max_tokens": 300}
ANSWERS = {"chat_template_kwargs": {"thinking": False}}
CITY = {"type": "string", "pattern": "^[a-z]{1,12}$"}
WEATHER = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
READ = {"type": "object", "properties": {"lines": {"enum": [10, 20]}}, "required": ["lines"]}
SCHEMAS = {"weather": WEATHER, "read": READ}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]


class Unit(Enum):
    C = "C"
    F = "F"


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)


class Choice(BaseModel):
    """Whole within 600 tokens, however much white space is between its parts."""

    model_config = ConfigDict(extra="forbid")

    unit: Unit
    is_certain: bool


class Forecast(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=12)
    unit: Unit
    temperatures: list[Annotated[int, Field(ge=-50, le=50)]] = Field(min_length=1, max_length=3)
    nearby: City | None


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = ClusterConfig(
        model=ModelSection(path=str(folder), name="tandem-python", warm_grammars=True),
        prefill=PrefillSection(num_blocks=64),
        decode=DecodeSection(num_blocks=64),
    )
    with Cluster(config, tmp_path_factory.mktemp("run")) as cluster:
        yield cluster


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2])
def test_the_clients_own_parser_reads_a_model(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.parse(
        **REQUEST, response_format=Forecast, seed=seed, extra_body=ANSWERS
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Forecast)


@pytest.mark.nightly
def test_the_parsers_of_responses_and_messages_read_a_model(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    options: dict[str, Any] = {"model": "tandem-python"}
    response = client.responses.parse(
        input="def f(x):", max_output_tokens=600, text_format=Choice, extra_body=ANSWERS, **options
    )
    assert response.status == "completed"
    assert isinstance(response.output_parsed, Choice)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    turns: Any = [{"role": "user", "content": "def f(x):"}]
    message = claude.messages.parse(
        messages=turns,
        max_tokens=600,
        thinking={"type": "disabled"},
        output_format=Choice,
        **options,
    )
    assert message.stop_reason == "end_turn"
    assert isinstance(message.parsed_output, Choice)


@pytest.mark.nightly
def test_a_schema_as_it_stands_in_responses_and_messages(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    options: dict[str, Any] = {"model": "tandem-python"}
    text: Any = {"format": {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True}}
    with client.responses.stream(
        input="def f(x):", max_output_tokens=600, text=text, extra_body=ANSWERS, **options
    ) as events:
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        response = events.get_final_response()
    assert response.output_text == "".join(deltas)
    jsonschema.validate(json.loads(response.output_text), WEATHER)
    turns: Any = [{"role": "user", "content": "def f(x):"}]
    config: Any = {"format": {"type": "json_schema", "schema": WEATHER}}
    with claude.messages.stream(
        messages=turns,
        max_tokens=600,
        thinking={"type": "disabled"},
        output_config=config,
        **options,
    ) as stream:
        written = "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason == "end_turn"
    jsonschema.validate(json.loads(written), WEATHER)


def check_calls(calls: list[tuple[str, str]]) -> None:
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("thinking", [False, True])
def test_a_tool_has_to_be_called(client: openai.OpenAI, thinking: bool) -> None:
    body: dict[str, Any] = {"chat_template_kwargs": {"thinking": thinking}}
    body |= {"max_reasoning_tokens": 8} if thinking else {}
    options: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "extra_body": body,
    }
    for seed in (1, 2):
        answer = client.chat.completions.create(**REQUEST, **options, seed=seed)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert not message.content
        (call,) = message.tool_calls or ()
        assert call.type == "function"
        check_calls([(call.function.name, call.function.arguments)])
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert details.reasoning_tokens in ((9, 10) if thinking else (0,))
        names, arguments = [], ""
        stream = client.chat.completions.create(**REQUEST, **options, seed=seed, stream=True)
        for chunk in stream:
            for news in chunk.choices[0].delta.tool_calls or ():
                names += [news.function.name] if news.id else []
                arguments += news.function.arguments
        assert (names, arguments) == ([call.function.name], call.function.arguments)


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "read"}}
    answer = client.chat.completions.create(
        **REQUEST, tools=TOOLS, tool_choice=choice, seed=1, extra_body=ANSWERS
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert json.loads(call.function.arguments)["lines"] in (10, 20)
    assert call.function.name == "read"


def test_patterns_choices_and_rules(client: openai.OpenAI) -> None:
    for field, value, pattern in (
        ("guided_regex", "[a-f]{3}-[0-9]{2}", r"[a-f]{3}-\d\d"),
        ("guided_choice", ["yes", "no", "it depends"], "yes|no|it depends"),
        ("ebnf", 'root ::= "<" [a-z] [a-z]? ">"', "<[a-z][a-z]?>"),
    ):
        for seed in range(3):
            options: dict[str, Any] = {"seed": seed, "extra_body": {field: value}}
            answer = client.completions.create(
                model="tandem-python", prompt="def f(x):", max_tokens=40, **options
            )
            assert re.fullmatch(pattern, answer.choices[0].text), (field, answer.choices[0])
            assert answer.choices[0].finish_reason == "stop"


def test_several_choices_each_parse(client: openai.OpenAI) -> None:
    schema = {"name": "weather", "schema": WEATHER, "strict": True}
    form: Any = {"type": "json_schema", "json_schema": schema}
    answer = client.chat.completions.create(
        **REQUEST, n=4, temperature=1.5, response_format=form, extra_body=ANSWERS
    )
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), WEATHER)


@pytest.mark.nightly
@pytest.mark.parametrize("bound", [60, 128, 129])
def test_a_bounded_string_is_json_whatever_is_likely(
    client: openai.OpenAI, folder: Path, bound: int
) -> None:
    """Backslashes here; and no log-probability is endless, of which JSON has no word."""
    backslash = Tokenizer.from_dir(folder).encode("\\", add_special_tokens=False)[0]
    schema = {"type": "object", "required": ["k"], "additionalProperties": False}
    schema |= {"properties": {"k": {"type": "string", "maxLength": bound}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "k", "schema": schema}}
    form["json_schema"]["strict"] = True
    answer = client.chat.completions.create(
        **REQUEST,
        response_format=form,
        logit_bias={str(backslash): 30},
        logprobs=True,
        top_logprobs=20,
        extra_body=ANSWERS,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    text = json.loads(choice.message.content or "")["k"]
    assert "\\" in text
    assert len(text) <= bound
    assert choice.logprobs is not None
    for entry in choice.logprobs.content or ():
        assert all(math.isfinite(each.logprob) for each in (entry, *entry.top_logprobs))
