"""instructor: typed answers by tools, by a schema and in parts."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from common import MAX_TOKENS, MODEL, PROMPT, URL, Answer, tell
from pydantic import BaseModel, ConfigDict


class Paint(BaseModel):
    """Paint the house."""

    model_config = ConfigDict(extra="forbid")

    color: Literal["red", "blue"]


plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
turns = [{"role": "user", "content": PROMPT}]
asked = {"model": MODEL, "messages": turns, "temperature": 0, "max_tokens": MAX_TOKENS}
by_tools = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
by_schema = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
painted = by_tools.create(response_model=Paint, max_retries=0, **asked)
answer = by_schema.create(response_model=Answer, max_retries=0, **asked)
parts = list(by_schema.create_partial(response_model=Answer, max_retries=0, **asked))
tell(
    chat=answer.size,
    streamed=parts[-1].size,
    called=[painted.model_dump()],
    structured=[answer.model_dump()],
)
