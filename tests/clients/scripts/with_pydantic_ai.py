"""pydantic-ai: text, a stream, a typed output by a tool and by a schema."""

from __future__ import annotations

import asyncio

from common import MAX_TOKENS, MODEL, PROMPT, URL, Answer, tell
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

SHORT = {"temperature": 0, "max_tokens": 16}
LONG = {"temperature": 0, "max_tokens": MAX_TOKENS}


async def main() -> None:
    """Text, its stream, and both ways to a typed output."""
    openai = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
    whole = await Agent(openai).run(PROMPT, model_settings=SHORT)
    async with Agent(openai).run_stream(PROMPT, model_settings=SHORT) as stream:
        streamed = await stream.get_output()
    by_tool = await Agent(openai, output_type=ToolOutput(Answer)).run("x", model_settings=LONG)
    by_schema = await Agent(openai, output_type=NativeOutput(Answer)).run("x", model_settings=LONG)
    tell(
        chat=whole.output,
        streamed=streamed,
        called=[],
        structured=[by_tool.output.model_dump(), by_schema.output.model_dump()],
    )


asyncio.run(main())
