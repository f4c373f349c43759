"""langchain-anthropic: a message, a stream, a bound tool, structured output by a tool."""

from __future__ import annotations

from common import MAX_TOKENS, MODEL, PARAMETERS, PROMPT, URL, Answer, tell
from langchain_anthropic import ChatAnthropic

server = {"model": MODEL, "base_url": URL, "api_key": "none", "max_retries": 0}
short = ChatAnthropic(**server, temperature=0, max_tokens=16)
long = ChatAnthropic(**server, temperature=0, max_tokens=MAX_TOKENS)
tool = {"name": "paint", "description": "Paint the house.", "input_schema": PARAMETERS}
(call,) = long.bind_tools([tool], tool_choice="any").invoke(PROMPT).tool_calls
tell(
    chat=short.invoke(PROMPT).text,
    streamed="".join(chunk.text for chunk in short.stream(PROMPT)),
    called=[call["args"]],
    structured=[long.with_structured_output(Answer).invoke(PROMPT).model_dump()],
)
