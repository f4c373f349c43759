"""The openai client: chat and responses, streams, a tool, structured output."""

from __future__ import annotations

import json

import openai
from common import MAX_TOKENS, MODEL, PARAMETERS, PROMPT, URL, Answer, tell

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
turns = [{"role": "user", "content": PROMPT}]
short = {"model": MODEL, "messages": turns, "temperature": 0, "max_tokens": 16}
chat = client.chat.completions.create(**short)
chunks = client.chat.completions.create(**short, stream=True)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

function = {"name": "paint", "description": "Paint the house.", "parameters": PARAMETERS}
called = client.chat.completions.create(
    **{**short, "max_tokens": MAX_TOKENS},
    tools=[{"type": "function", "function": function}],
    tool_choice="required",
)
(call,) = called.choices[0].message.tool_calls
parsed = client.chat.completions.parse(
    **{**short, "max_tokens": MAX_TOKENS}, response_format=Answer
)

asked = {"model": MODEL, "input": PROMPT, "temperature": 0, "store": False}
response = client.responses.create(**asked, max_output_tokens=16)
with client.responses.stream(**asked, max_output_tokens=16) as events:
    kinds = [event.type for event in events]
tool = {"type": "function", **function, "strict": False}
of_response = client.responses.create(
    **asked, max_output_tokens=MAX_TOKENS, tools=[tool], tool_choice="required"
)
(item,) = [item for item in of_response.output if item.type == "function_call"]
structured = client.responses.parse(**asked, max_output_tokens=MAX_TOKENS, text_format=Answer)
assert response.output_text == chat.choices[0].message.content
assert kinds[0] == "response.created", kinds
assert kinds[-1] == "response.incomplete", kinds
tell(
    chat=chat.choices[0].message.content,
    streamed=streamed,
    called=[json.loads(call.function.arguments), json.loads(item.arguments)],
    structured=[
        parsed.choices[0].message.parsed.model_dump(),
        structured.output_parsed.model_dump(),
    ],
)
