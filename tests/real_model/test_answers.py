"""A real model through a prefill group of three ranks, one KV head each, and two decode ranks.

Its answers are transformers', token for token. The same weights in float32 are summed in another
order by three ranks, so a token may differ where transformers itself has next to a tie: it is
counted, and none is expected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from tests.integration.cluster import Cluster
from tests.real_model.asking import MODEL, ask_all, ask_chat
from tests.real_model.questions import PROMPTS, QUESTIONS

if TYPE_CHECKING:
    from tests.real_model.reference import Reference

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_TOKENS = 32
TIE = 1e-3
"""The largest difference of two logits, of around 20, that another order of sums may turn."""
NUM_LONG = 4000
CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "color": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "color"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = ClusterConfig(
        model=ModelSection(path=str(checkpoint), name=MODEL, dtype="float32"),
        prefill=PrefillSection(tp=3, max_num_batched_tokens=512, num_blocks=256),
        decode=DecodeSection(dp=2, num_blocks=160),
    )
    with Cluster(config, tmp_path_factory.mktemp("run")) as cluster:
        yield cluster


def chats(prompts: Sequence[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def check_greedy(
    reference: Reference, prompts: Sequence[Sequence[int]], answers: Sequence[dict[str, Any]]
) -> None:
    """Each answer is the reference's of its prompt, but for ties, of which there may be one."""
    ties = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["prompt_token_ids"] == prompt
        (choice,) = answer["choices"]
        tokens = choice["token_ids"]
        if choice["finish_reason"] == "stop":
            assert tokens[-1] == reference.eos_token_id
        assert reference.eos_token_id not in tokens[:-1]
        found = reference.differences(prompt, tokens)
        assert all(each.margin < TIE for each in found), (answer, found)
        ties += len(found)
    assert ties <= 1, f"{ties} tokens differ, each within {TIE:g} of a tie"


def test_fifty_answers_are_those_of_transformers(cluster: Cluster, reference: Reference) -> None:
    conversations = chats(PROMPTS)
    bodies = [{"messages": each, "max_tokens": NUM_TOKENS} for each in conversations]
    answers = ask_all(cluster.base_url, CHAT, bodies)
    prompts = [reference.prompt_of(each) for each in conversations]
    check_greedy(reference, prompts, answers)
    choices = [answer["choices"][0] for answer in answers]
    assert {choice["finish_reason"] for choice in choices} == {"stop", "length"}
    assert "Paris" in choices[0]["message"]["content"]
    cluster.wait_idle()


def test_the_loop_of_transformers_says_the_same(cluster: Cluster, reference: Reference) -> None:
    """`generate` with its KV cache, where the test of fifty judges each token by the text alone."""
    conversations = chats(PROMPTS[:4])
    bodies = [{"messages": each, "max_tokens": NUM_TOKENS} for each in conversations]
    answers = ask_all(cluster.base_url, CHAT, bodies)
    expected = [reference.generate(reference.prompt_of(each), NUM_TOKENS) for each in conversations]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected


def test_long_contexts(cluster: Cluster, reference: Reference) -> None:
    """In eight chunks, and again behind what the prefix cache has of them."""
    prompts = []
    for start in (100, 5000):
        facts = [
            f"The box number {n} holds {n * 37 % 101} coins." for n in range(start, start + 400)
        ]
        prompts.append(reference.encode(" ".join(facts))[:NUM_LONG])
    assert [len(prompt) for prompt in prompts] == [NUM_LONG] * 2
    bodies = [{"prompt": prompt, "max_tokens": 16} for prompt in prompts]
    cold = ask_all(cluster.base_url, "/v1/completions", bodies)
    check_greedy(reference, prompts, [{**a, **_prompt_ids(a)} for a in cold])
    warm = ask_all(cluster.base_url, "/v1/completions", bodies)
    for before, after in zip(cold, warm, strict=True):
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == NUM_LONG // 64 * 64
        assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
    cluster.wait_idle()


def _prompt_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """Of a completion, whose choices each have them."""
    return {"prompt_token_ids": answer["choices"][0]["prompt_token_ids"]}


def test_json_is_valid(cluster: Cluster) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    prompts = ("Describe a person named Anna.", "Make up a pirate.", "Tell me about Tom, who is 7.")
    bodies = [
        {"messages": each, "response_format": form, "max_tokens": 200} for each in chats(prompts)
    ]
    answers = ask_all(cluster.base_url, CHAT, bodies)
    people = []
    for answer in answers:
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop", choice
        people.append(json.loads(choice["message"]["content"]))
        jsonschema.validate(people[-1], SCHEMA)
    assert "Anna" in people[0]["name"]


def test_conversations_go_on(cluster: Cluster, reference: Reference) -> None:
    """A second turn behind the first answer, with a system's message."""
    system = {"role": "system", "content": "You answer in one short sentence."}
    turns = [system, {"role": "user", "content": "My name is Ada. Who am I?"}]
    first = ask_chat(cluster.base_url, messages=turns, max_tokens=NUM_TOKENS)
    said = first["choices"][0]["message"]["content"]
    turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "Say it again."}]
    second = ask_chat(cluster.base_url, messages=turns, max_tokens=NUM_TOKENS)
    check_greedy(reference, [reference.prompt_of(turns)], [second])


def test_scores_are_those_of_transformers(cluster: Cluster, reference: Reference) -> None:
    """As harnesses score answers: the log-probabilities of an end behind its beginning."""
    hits = 0
    for question in QUESTIONS:
        begin = reference.encode(question.text)
        texts = [question.text + end for end in question.ends]
        ids = [reference.encode(text) for text in texts]
        assert all(each[: len(begin)] == begin for each in ids)
        expected = reference.logprobs(ids)
        bodies = [{"prompt": each, "echo": True, "logprobs": 1, "max_tokens": 1} for each in texts]
        answers = ask_all(cluster.base_url, "/v1/completions", bodies)
        choices = [answer["choices"][0] for answer in answers]
        assert [choice["prompt_token_ids"] for choice in choices] == ids
        found = [
            choice["logprobs"]["token_logprobs"][1 : len(each)]
            for choice, each in zip(choices, ids, strict=True)
        ]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3)
        scores = [sum(each[len(begin) - 1 :]) for each in found]
        hits += scores[0] == max(scores)
    assert hits >= 0.9 * len(QUESTIONS), "chance is a quarter"
    cluster.wait_idle()
