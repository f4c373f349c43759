"""langchain-openai: a message, a stream, a bound tool, structured output; responses as well."""

from __future__ import annotations

from common import MAX_TOKENS, MODEL, PROMPT, URL, Answer, paint, tell
from langchain_openai import ChatOpenAI

server = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
short = ChatOpenAI(**server, temperature=0, max_tokens=16)
long = ChatOpenAI(**server, temperature=0, max_tokens=MAX_TOKENS)
by_responses = ChatOpenAI(**server, temperature=0, max_tokens=16, use_responses_api=True)
whole = short.invoke(PROMPT)
assert by_responses.invoke(PROMPT).text == whole.text
(call,) = long.bind_tools([paint], tool_choice="any", strict=True).invoke(PROMPT).tool_calls
structured = long.with_structured_output(Answer, method="json_schema").invoke(PROMPT)
tell(
    chat=whole.text,
    streamed="".join(chunk.text for chunk in short.stream(PROMPT)),
    called=[call["args"]],
    structured=[structured.model_dump()],
)
