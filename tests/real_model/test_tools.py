"""A real model calls tools by a template of ours: its own reads none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from tests.integration.cluster import Cluster
from tests.real_model.asking import MODEL, ask_chat

if TYPE_CHECKING:
    from tests.real_model.reference import Reference

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1200)]
TEMPLATE = Path(__file__).with_name("tools.jinja")
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 30},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": PARAMETERS,
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "description": "The time.", "parameters": {"type": "object"}},
}
QUESTION = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = ClusterConfig(
        model=ModelSection(
            path=str(checkpoint), name=MODEL, dtype="float32", chat_template=str(TEMPLATE)
        ),
        prefill=PrefillSection(num_blocks=160),
        decode=DecodeSection(num_blocks=160),
    )
    with Cluster(config, tmp_path_factory.mktemp("run")) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["required", "named"],
)
def test_a_call_is_made_and_answered(cluster: Cluster, choice: Any) -> None:
    """The right tool with the right city is the model's work, what is valid that of grammars."""
    options = {"tools": [TIME, WEATHER], "max_tokens": 200}
    answer = ask_chat(cluster.base_url, messages=QUESTION, tool_choice=choice, **options)
    (found,) = answer["choices"]
    assert found["finish_reason"] == "tool_calls"
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, PARAMETERS)
    assert "Paris" in arguments["city"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "21 degrees and sunny"}
    turns = [*QUESTION, found["message"], result]
    last = ask_chat(cluster.base_url, messages=turns, tool_choice="none", **options)
    message = last["choices"][0]["message"]
    assert not message.get("tool_calls")
    assert "21" in message["content"]


def test_without_tools_it_writes_what_the_checkpoints_own_does(
    cluster: Cluster, reference: Reference
) -> None:
    for turns in (QUESTION, [{"role": "system", "content": "Be brief."}, *QUESTION]):
        answer = ask_chat(cluster.base_url, messages=turns, max_tokens=16)
        assert answer["prompt_token_ids"] == reference.prompt_of(turns)
        assert (
            reference.differences(answer["prompt_token_ids"], answer["choices"][0]["token_ids"])
            == []
        )
