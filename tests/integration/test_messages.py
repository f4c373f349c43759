"""The bundled model under a template with tools and reasoning: what it writes comes out whole.

It has never learnt either: its reasoning is one that nobody ends. Calls are in
``test_structured_output``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from router.model import load_served_model
from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR
from tests.router.text import templates

if TYPE_CHECKING:
    import openai

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
REQUEST = {
    "model": "tandem-python",
    "messages": [{"role": "user", "content": "def fibonacci(n):"}],
    "temperature": 0,
    "max_tokens": 24,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    for file in MODEL_DIR.iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    source = templates.DEEPSEEK_V31
    for ours, theirs in (("<user>", "User"), ("<assistant>", "Assistant")):
        source = source.replace(ours, f"<\uff5c{theirs}\uff5c>")
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    import openai

    config = ClusterConfig(
        model=ModelSection(path=str(folder), name="tandem-python"),
        prefill=PrefillSection(num_blocks=32),
        decode=DecodeSection(num_blocks=32),
    )
    with Cluster(config, tmp_path_factory.mktemp("run")) as cluster:
        base_url = f"{cluster.base_url}/v1"
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            yield client


def raw_text(client: openai.OpenAI, folder: Path, prompt_ids: list[int]) -> tuple[str, int]:
    """What the model writes behind a prompt, with every token shown, and how many they are."""
    answer = client.completions.create(
        model="tandem-python",
        prompt=prompt_ids,
        temperature=0,
        max_tokens=24,
        extra_body={"return_token_ids": True},
    )
    ids = answer.choices[0].token_ids
    pieces = load_served_model(ModelSection(path=str(folder))).tokenizer.vocabulary.pieces
    return b"".join(pieces[token_id] for token_id in ids).decode(errors="replace"), len(ids)


def test_reasoning_that_the_template_opens(client: openai.OpenAI, folder: Path) -> None:
    body = {"chat_template_kwargs": {"thinking": True}, "return_token_ids": True}
    answer = client.chat.completions.create(**REQUEST, extra_body=body)
    message = answer.choices[0].message
    text, num_tokens = raw_text(client, folder, answer.prompt_token_ids)
    assert message.reasoning == message.reasoning_content
    assert message.content == ""
    assert text.startswith(message.reasoning)
    assert len(message.reasoning) > 10
    assert answer.usage.completion_tokens == num_tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens >= num_tokens - 1
    closed = {"chat_template_kwargs": {"thinking": False}}
    answer = client.chat.completions.create(**REQUEST, extra_body=closed)
    assert answer.choices[0].message.reasoning is None
    assert answer.choices[0].message.content
