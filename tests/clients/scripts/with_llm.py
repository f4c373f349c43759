"""llm, the library of the command: an answer, a stream, a tool that is offered, a schema."""

from __future__ import annotations

import json
import os
from pathlib import Path

from common import MAX_TOKENS, MODEL, PROMPT, URL, Answer, paint, tell

folder = Path.cwd() / "llm"
folder.mkdir(exist_ok=True)
entry = {
    "model_id": "tandem",
    "model_name": MODEL,
    "api_base": f"{URL}/v1",
    "supports_schema": True,
    "supports_tools": True,
}
(folder / "extra-openai-models.yaml").write_text(json.dumps([entry]))
os.environ["LLM_USER_PATH"] = str(folder)

import llm  # noqa: E402  # it looks for its folder once

model = llm.get_model("tandem")
model.key = "none"
options = {"temperature": 0, "max_tokens": 16}
long = {"temperature": 0, "max_tokens": MAX_TOKENS}
offered = model.prompt(PROMPT, tools=[paint], stream=False, **options)
assert offered.text()
document = model.prompt(PROMPT, schema=Answer, stream=False, **long)
tell(
    chat=model.prompt(PROMPT, stream=False, **options).text(),
    streamed="".join(model.prompt(PROMPT, stream=True, **options)),
    called=[],
    structured=[json.loads(document.text())],
)
