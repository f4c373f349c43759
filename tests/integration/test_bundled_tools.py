"""Agents on a laptop: the bundled model, as it ships, calls tools through every API.

It has never seen a tool, so that its calls are valid is the work of grammars.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR

if TYPE_CHECKING:
    import anthropic
    import openai

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(600)]
MODEL = "tandem-python"
MESSAGES: Any = [{"role": "user", "content": "def fibonacci(n):"}]
CITY = {"type": "string", "pattern": "^[a-z]{1,12}$"}
SCHEMA = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "weather", "parameters": SCHEMA, "strict": True}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR), name=MODEL, warm_grammars=True),
        prefill=PrefillSection(num_blocks=64),
        decode=DecodeSection(num_blocks=64),
    )
    with Cluster(config, tmp_path_factory.mktemp("run")) as cluster:
        yield cluster


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_chat(client: openai.OpenAI, choice: Any) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "tools": TOOLS}
    answer = client.chat.completions.create(
        messages=MESSAGES, tool_choice=choice, parallel_tool_calls=False, **options
    )
    (found,) = answer.choices
    if choice == "auto":
        assert found.finish_reason in ("stop", "length", "tool_calls")
        assert found.message.content or found.message.tool_calls
        return
    assert found.finish_reason == "tool_calls"
    assert found.message.tool_calls is not None
    (call,) = found.message.tool_calls
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*MESSAGES, found.message.model_dump(exclude_none=True), result]
    again = client.chat.completions.create(
        messages=messages, tool_choice="none", **{**options, "max_tokens": 8}
    )
    assert again.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "name": "weather"}],
    ids=["required", "named"],
)
def test_responses(client: openai.OpenAI, choice: Any) -> None:
    tools: Any = [{"type": "function", **FUNCTION}]
    response = client.responses.create(
        model=MODEL,
        input="def fibonacci(n):",
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_output_tokens=300,
    )
    assert response.status == "completed"
    (item,) = response.output
    assert item.type == "function_call"
    jsonschema.validate(json.loads(item.arguments), SCHEMA)


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=["any", "named"]
)
def test_messages(claude: anthropic.Anthropic, choice: Any) -> None:
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    message = claude.messages.create(
        model=MODEL,
        messages=MESSAGES,
        tools=tools,
        tool_choice={**choice, "disable_parallel_tool_use": True},
        max_tokens=300,
    )
    assert message.stop_reason == "tool_use"
    (block,) = message.content
    assert block.type == "tool_use"
    jsonschema.validate(block.input, SCHEMA)
