"""litellm: its providers for servers of this kind, a stream, a tool, structured output."""

from __future__ import annotations

import json

import litellm
from common import MAX_TOKENS, MODEL, PARAMETERS, PROMPT, URL, Answer, tell

server = {"api_base": f"{URL}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}
turns = [{"role": "user", "content": PROMPT}]
short = {"model": f"openai/{MODEL}", "messages": turns, "max_tokens": 16, **server}
long = {**short, "max_tokens": MAX_TOKENS}
whole = litellm.completion(**short)
same = litellm.completion(**{**short, "model": f"hosted_vllm/{MODEL}"}, reasoning_effort="low")
assert same.choices[0].message.content == whole.choices[0].message.content
chunks = litellm.completion(**short, stream=True)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
function = {"name": "paint", "description": "Paint the house.", "parameters": PARAMETERS}
called = litellm.completion(
    **long, tools=[{"type": "function", "function": function}], tool_choice="required"
)
(call,) = called.choices[0].message.tool_calls
document = litellm.completion(**long, response_format=Answer)
tell(
    chat=whole.choices[0].message.content,
    streamed=streamed,
    called=[json.loads(call.function.arguments)],
    structured=[json.loads(document.choices[0].message.content)],
)
