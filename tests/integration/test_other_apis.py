"""Other APIs with the bundled model: the same tokens in each, and nothing held by who hangs up."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR

if TYPE_CHECKING:
    import anthropic
    import openai

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
MODEL = "tandem-python"
PROMPT = "def fibonacci(n):"
TURNS = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR), name=MODEL),
        prefill=PrefillSection(num_blocks=32),
        decode=DecodeSection(num_blocks=32),
    )
    with Cluster(config, tmp_path_factory.mktemp("run")) as cluster:
        yield cluster


def test_every_api_says_what_chat_says(
    cluster: Cluster, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    options = {"model": MODEL, "temperature": 0.0}
    chat = client.chat.completions.create(messages=TURNS, max_tokens=24, **options)
    expected = chat.choices[0].message.content
    assert len(expected) > 10
    whole = client.responses.create(input=PROMPT, max_output_tokens=24, **options)
    with client.responses.stream(input=PROMPT, max_output_tokens=24, **options) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
    greedy = {"model": MODEL, "messages": TURNS, "extra_body": {"temperature": 0}}
    message = claude.messages.create(**greedy, max_tokens=24)
    with claude.messages.stream(**greedy, max_tokens=24) as stream:
        texts = list(stream.text_stream)
    assert whole.output_text == "".join(deltas) == expected
    assert message.content[0].text == "".join(texts) == expected
    assert len(deltas) > 5
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.output_tokens == message.usage.output_tokens == chat.usage.completion_tokens


def test_log_probabilities_of_generate_are_those_of_completions(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    completion = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=2, echo=True
    )
    sampling = {"max_new_tokens": 8, "temperature": 0}
    body = {"text": PROMPT, "sampling_params": sampling, "return_logprob": True}
    request = urllib.request.Request(
        f"{cluster.base_url}/generate",
        json.dumps({**body, "logprob_start_len": 0, "top_logprobs_num": 2}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        meta = json.load(response)["meta_info"]
    found = [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]
    expected = completion.choices[0].logprobs.token_logprobs
    assert found[0][0] is None
    assert expected[0] is None
    assert [entry[0] for entry in found[1:]] == pytest.approx(expected[1:], abs=1e-4)


def test_who_hangs_up_leaves_nothing_behind(
    cluster: Cluster, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    for _ in range(3):
        stream = client.responses.create(
            model=MODEL, input=PROMPT, stream=True, extra_body={"ignore_eos": True}
        )
        next(event for event in stream if event.type == "response.output_text.delta")
        stream.close()
        with claude.messages.stream(model=MODEL, messages=TURNS, max_tokens=200) as stream:
            next(iter(stream.text_stream))
    cluster.wait_idle()
