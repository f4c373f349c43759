"""`prompt_logprobs` in vLLM's shape, on both endpoints, and what is refused of it."""

from __future__ import annotations

import openai
import pytest

from runtime.sampling import MAX_PROMPT_LOGPROBS
from tests.router.conftest import MODEL, Cluster

PROMPT = [65, 66, 67]
MESSAGES = [{"role": "user", "content": "say hello"}]


async def complete(client: openai.AsyncOpenAI, prompt, extra, **options):
    return await client.completions.create(
        **{"model": MODEL, "prompt": prompt, "max_tokens": 2, **options}, extra_body=extra
    )


def check(entries, token_ids, cluster: Cluster, count: int) -> None:
    assert len(entries) == len(token_ids)
    assert entries[0] is None
    vocabulary = cluster.tokenizer.vocabulary
    for token_id, entry in zip(token_ids[1:], entries[1:], strict=True):
        own = {"logprob": -0.5, "rank": 1, "decoded_token": vocabulary.token_text(token_id)}
        assert list(entry) == [str(token_id + i) for i in range(max(count, 1))]
        assert entry[str(token_id)] == own
        for place in range(1, count):
            other = entry[str(token_id + place)]
            assert (other["logprob"], other["rank"]) == (-0.5 - place, place + 1)


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_completions_have_them_in_each_choice(client, cluster: Cluster, count: int) -> None:
    answer = await complete(client, [PROMPT, PROMPT[:2]], {"prompt_logprobs": count}, n=2)
    for index, choice in enumerate(answer.choices):
        token_ids = PROMPT if index < 2 else PROMPT[:2]
        check(choice.model_extra["prompt_logprobs"], token_ids, cluster, count)
        assert choice.logprobs is None
    assert {request.sampling.num_prompt_logprobs for request in cluster.prefill.seen} == {count}


async def test_chat_has_them_beside_the_choices(client, cluster: Cluster) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, extra_body={"prompt_logprobs": 2}
    )
    text = "<bos><user>say hello<assistant>"
    token_ids = cluster.tokenizer.encode(text, add_special_tokens=False)
    check(answer.model_extra["prompt_logprobs"], token_ids, cluster, 2)


async def test_who_does_not_ask_is_told_nothing(client) -> None:
    answer = await complete(client, PROMPT, {}, logprobs=1, echo=True)
    assert "prompt_logprobs" not in answer.choices[0].model_extra
    chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert "prompt_logprobs" not in chat.model_extra


async def test_echo_and_prompt_logprobs_are_of_the_same_tokens(client, cluster: Cluster) -> None:
    answer = await complete(client, PROMPT, {"prompt_logprobs": 3}, logprobs=1, echo=True)
    (choice,) = answer.choices
    check(choice.model_extra["prompt_logprobs"], PROMPT, cluster, 3)
    assert choice.logprobs.token_logprobs[:3] == [None, -0.5, -0.5]


@pytest.mark.parametrize(
    ("extra", "options", "text"),
    [
        ({"prompt_logprobs": 21}, {}, "prompt_logprobs = 21"),
        ({"prompt_logprobs": -1}, {}, "prompt_logprobs = -1"),
        ({"prompt_logprobs": 1}, {"stream": True}, "not told in streams"),
    ],
)
async def test_what_is_refused(client, cluster: Cluster, extra, options, text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text) as caught:
        await complete(client, PROMPT, extra, **options)
    assert caught.value.param == "prompt_logprobs"
    assert cluster.prefill.seen == []


@pytest.mark.parametrize("field", ["prompt_logprobs", "logprobs"])
async def test_all_prompts_of_a_request_have_so_many_at_most(
    client, cluster: Cluster, field: str
) -> None:
    each = 128 * 200 * 21  # n, tokens, log-probabilities of one
    number = MAX_PROMPT_LOGPROBS // each + 1
    prompts = [[65] * 200] * number
    extra = {"prompt_logprobs": 20} if field == "prompt_logprobs" else {}
    options = {} if extra else {"logprobs": 20, "echo": True}
    with pytest.raises(openai.BadRequestError, match=f"may have {MAX_PROMPT_LOGPROBS}") as caught:
        await complete(client, prompts, extra, n=128, **options)
    assert caught.value.param == field
    assert cluster.prefill.seen == []
