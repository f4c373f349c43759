"""The anthropic client: messages, a stream, a tool and its result, structured output."""

from __future__ import annotations

import json

import anthropic
from common import MAX_TOKENS, MODEL, PARAMETERS, PROMPT, URL, Answer, paint, tell

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
turns = [{"role": "user", "content": PROMPT}]
short = {"model": MODEL, "messages": turns, "max_tokens": 16, "extra_body": {"temperature": 0}}
message = client.messages.create(**short)
with client.messages.stream(**short) as stream:
    streamed = "".join(stream.text_stream)

tools = [{"name": "paint", "description": "Paint the house.", "input_schema": PARAMETERS}]
long = {**short, "max_tokens": MAX_TOKENS}
called = client.messages.create(**long, tools=tools, tool_choice={"type": "any"})
(use,) = [block for block in called.content if block.type == "tool_use"]
result = {"type": "tool_result", "tool_use_id": use.id, "content": paint(**use.input)}
turns += [
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [result]},
]
after = client.messages.create(**{**short, "messages": turns}, tools=tools)
assert after.stop_reason in ("end_turn", "max_tokens"), after
schema = {"type": "json_schema", "schema": Answer.model_json_schema()}
document = client.messages.create(**long, output_config={"format": schema})
tell(
    chat=message.content[0].text,
    streamed=streamed,
    called=[use.input],
    structured=[json.loads(document.content[0].text)],
)
