"""openai-agents: a tool loop, a typed output and a stream, over chat completions and responses."""

from __future__ import annotations

import asyncio
import json

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import MAX_TOKENS, MODEL, PROMPT, URL, Answer, paint, tell


async def told(make: type) -> dict[str, object]:
    """What one API gave."""
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    model = make(model=MODEL, openai_client=client)
    long = ModelSettings(temperature=0, max_tokens=MAX_TOKENS)
    plain = Agent(name="plain", model=model, model_settings=long)
    whole = await Runner.run(plain, PROMPT)
    run = Runner.run_streamed(plain, PROMPT)
    streamed = ""
    async for event in run.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            streamed += event.data.delta
    must = ModelSettings(temperature=0, max_tokens=MAX_TOKENS, tool_choice="required")
    painter = Agent(name="painter", model=model, model_settings=must, tools=[function_tool(paint)])
    painted = await Runner.run(painter, "Paint it.")
    calls = [item for item in painted.new_items if item.type == "tool_call_item"]
    results = [item for item in painted.new_items if item.type == "tool_call_output_item"]
    assert len(calls) == len(results) == 1, painted.new_items
    typed = Agent(name="typed", model=model, model_settings=long, output_type=Answer)
    document = await Runner.run(typed, "Answer.")
    return {
        "chat": whole.final_output,
        "streamed": streamed,
        "called": [json.loads(calls[0].raw_item.arguments)],
        "structured": [document.final_output.model_dump()],
    }


async def main() -> None:
    """Both of its models."""
    set_tracing_disabled(True)
    of_chat = await told(OpenAIChatCompletionsModel)
    of_responses = await told(OpenAIResponsesModel)
    assert of_chat["chat"] == of_responses["chat"]
    assert of_responses["streamed"] == of_responses["chat"]
    tell(**of_chat)


asyncio.run(main())
