"""``/v1/completions`` through the real ``openai`` client over HTTP."""

from __future__ import annotations

import openai
import pytest

from tests.router.conftest import ANSWER, MODEL, Cluster


async def complete(client: openai.AsyncOpenAI, prompt, **options):
    return await client.completions.create(
        **{"model": MODEL, "prompt": prompt, "max_tokens": 200, **options}
    )


async def test_a_text_prompt(client, cluster: Cluster) -> None:
    answer = await complete(client, "def fib")
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    ids = list(cluster.prefill.seen[0].context_token_ids)
    assert ids == cluster.tokenizer.encode("def fib", add_special_tokens=True)
    assert ids[0] == cluster.tokenizer.token_id("<bos>")


async def test_the_default_is_16_tokens(client, cluster: Cluster) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt="x", extra_body={"ignore_eos": True}
    )
    assert cluster.prefill.seen[0].sampling.max_tokens == 16
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["a", "b"], None),
        ([65, 66, 67], [[65, 66, 67]]),
        ([[65, 66], [67]], [[65, 66], [67]]),
    ],
)
async def test_prompts_in_all_their_shapes(client, cluster: Cluster, prompt, expected) -> None:
    answer = await complete(client, prompt, n=2)
    if expected is None:
        expected = [cluster.tokenizer.encode(text, add_special_tokens=True) for text in prompt]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    assert all(choice.text == ANSWER for choice in answer.choices)
    seen = {tuple(request.context_token_ids) for request in cluster.prefill.seen}
    assert seen == {tuple(ids) for ids in expected}
    assert answer.usage.prompt_tokens == sum(map(len, expected))
    for request in cluster.prefill.seen:  # prompt i's choice j is number i * n + j
        index = int(request.request_id.rpartition(".")[2])
        assert list(request.context_token_ids) == expected[index // 2]


async def test_many_prompts_at_once(client, cluster: Cluster) -> None:
    answer = await complete(client, [[70 + i % 20, 71] for i in range(100)], max_tokens=2)
    assert len(answer.choices) == 100
    assert answer.usage.completion_tokens == 200


async def test_a_streamed_answer(client, cluster: Cluster) -> None:
    stream = await complete(client, "x", stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == cluster.num_answer_tokens


async def test_echo_with_logprobs_as_evaluation_tools_ask(client, cluster: Cluster) -> None:
    ids = cluster.tokenizer.encode("the quick brown fox", add_special_tokens=False)
    answer = await complete(client, [ids], echo=True, logprobs=1, max_tokens=1, temperature=0)
    choice = answer.choices[0]
    assert choice.text.startswith("the quick brown fox")
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(ids) + 1
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert logprobs.text_offset[0] == 0
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    for token, value, top in list(
        zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    )[1:]:
        assert top[token] == value
    assert cluster.prefill.seen[0].sampling.num_prompt_logprobs == 1


async def test_echo_in_a_stream(client, cluster: Cluster) -> None:
    stream = await complete(client, "w\u00f6rld ", echo=True, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].text == "w\u00f6rld "
    assert "".join(chunk.choices[0].text for chunk in chunks) == "w\u00f6rld " + ANSWER


async def test_special_tokens_can_be_shown(client, cluster: Cluster) -> None:
    cluster.answer = "a<user>b"
    hidden = await complete(client, "x")
    assert hidden.choices[0].text == "ab"
    shown = await complete(client, "x", extra_body={"skip_special_tokens": False})
    assert shown.choices[0].text == "a<user>b"


async def test_models(client, cluster: Cluster) -> None:
    models = (await client.models.list()).data
    assert [model.id for model in models] == [MODEL]
    assert models[0].max_model_len == 256
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("org/other")
