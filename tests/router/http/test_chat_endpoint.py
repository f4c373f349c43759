"""``/v1/chat/completions`` through the real ``openai`` client over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.router.conftest import ANSWER, MODEL, Cluster
from tests.waiting import until

if TYPE_CHECKING:
    import openai

MESSAGES = [{"role": "user", "content": "say hello"}]


async def chat(client: openai.AsyncOpenAI, **options):
    return await client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **options})


async def test_a_plain_answer(client, cluster: Cluster) -> None:
    answer = await chat(client)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    prompt = cluster.tokenizer.encode("<bos><user>say hello<assistant>", add_special_tokens=False)
    assert list(cluster.prefill.seen[0].context_token_ids) == prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == cluster.num_answer_tokens
    assert answer.usage.total_tokens == len(prompt) + cluster.num_answer_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == len(prompt) // 2
    assert cluster.decode.aborted == []


async def test_a_streamed_answer(client, cluster: Cluster) -> None:
    chunks = [chunk async for chunk in await chat(client, stream=True)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 5


async def test_usage_in_a_stream(client, cluster: Cluster) -> None:
    stream = await chat(client, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == cluster.num_answer_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_continuous_usage(client, cluster: Cluster) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [c async for c in await chat(client, stream=True, stream_options=options)]
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == cluster.num_answer_tokens


async def test_several_choices(client, cluster: Cluster) -> None:
    answer = await chat(client, n=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {ANSWER}
    assert answer.usage.completion_tokens == 3 * cluster.num_answer_tokens
    seeds = [request.sampling.seed for request in cluster.decode.seen]
    assert 7 in seeds
    assert len(set(seeds)) == 3
    chunks = [chunk async for chunk in await chat(client, n=2, stream=True)]
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == ANSWER
        assert mine[-1].finish_reason == "stop"


async def test_a_stop_string_ends_decode(client, cluster: Cluster) -> None:
    cluster.decode.step_s = 0.01
    answer = await chat(client, stop=["END", "never"])
    assert answer.choices[0].message.content == ANSWER[: ANSWER.index("END")]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < cluster.num_answer_tokens
    await until(lambda: len(cluster.decode.aborted) == 1)
    assert cluster.decode.requests == {}
    kept = await chat(client, stop="END", extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == ANSWER[: ANSWER.index("END") + 3]


async def test_max_tokens_ends_with_length(client, cluster: Cluster) -> None:
    answer = await chat(client, max_tokens=1000, max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3
    one = await chat(client, max_completion_tokens=1)
    assert one.choices[0].finish_reason == "length"
    await until(lambda: not cluster.decode.requests)
    assert cluster.decode.aborted == []


async def test_max_tokens_is_capped_by_the_context(client, cluster: Cluster) -> None:
    answer = await chat(client, extra_body={"ignore_eos": True})
    sampling = cluster.prefill.seen[-1].sampling
    assert sampling.max_tokens == 256 - answer.usage.prompt_tokens
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 256


async def test_logprobs(client, cluster: Cluster) -> None:
    answer = await chat(client, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == cluster.num_answer_tokens
    joined = b"".join(bytes(entry.bytes) for entry in content)
    assert joined.decode() == ANSWER + "<eos>"
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert content[0].logprob == pytest.approx(-0.5)
    chunks = [c async for c in await chat(client, logprobs=True, stream=True)]
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in content]


async def test_sampling_reaches_the_workers(client, cluster: Cluster) -> None:
    await chat(
        client,
        temperature=0.25,
        top_p=0.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": 2.0},
        seed=-1,
        extra_body={
            "top_k": 7,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "stop_token_ids": [9],
        },
    )
    sampling = cluster.decode.seen[0].sampling
    assert sampling == cluster.prefill.seen[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 7)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert dict(sampling.logit_bias) == {5: 2.0}
    assert sampling.seed == 2**64 - 1
    assert sampling.min_tokens == 2
    assert list(sampling.stop_token_ids) == [cluster.eos, 9]
    assert sampling.num_logprobs == -1


async def test_messages_in_all_their_shapes(client, cluster: Cluster) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "user", "content": "c"},
    ]
    await chat(client, messages=messages)
    text = "<bos>be brief<user>ab<assistant><eos><user>c<assistant>"
    expected = cluster.tokenizer.encode(text, add_special_tokens=False)
    assert list(cluster.prefill.seen[0].context_token_ids) == expected


async def test_the_last_message_can_be_continued(client, cluster: Cluster) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Sure, ", "prefix": True}]
    await chat(client, messages=messages)
    text = "<bos><user>say hello<assistant>Sure,"
    expected = cluster.tokenizer.encode(text, add_special_tokens=False)
    assert list(cluster.prefill.seen[0].context_token_ids) == expected


async def test_harmless_fields_are_accepted(client, cluster: Cluster) -> None:
    answer = await chat(
        client,
        metadata={"a": "b"},
        user="me",
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        modalities=["text"],
        prediction=None,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        tool_choice="none",
        extra_body={"priority": 1, "separate_reasoning": False, "rid": "x"},
    )
    assert answer.choices[0].message.content == ANSWER


async def test_timings_on_request(client, cluster: Cluster) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, extra_headers={"x-tandem-timings": "1"}
    )
    timings = raw.parse().timings
    assert timings["prefill_compute_s"] == pytest.approx(0.003)
    assert timings["kv_transfer_s"] == pytest.approx(0.002)
    assert 0 <= timings["router_s"] <= timings["ttft_s"] <= timings["total_s"]
    assert timings["router_s"] <= timings["in_router_s"] <= timings["ttft_s"]
    assert "x-tandem-timings" in raw.headers
    stream = await chat(client, stream=True, extra_body={"timings": True})
    last = [chunk async for chunk in stream][-1]
    assert last.timings["ttft_s"] > 0
    assert not hasattr(await chat(client), "timings")


async def test_token_ids_on_request(client, cluster: Cluster) -> None:
    answer = await chat(client, extra_body={"return_token_ids": True})
    expected = cluster.tokenizer.encode(ANSWER, add_special_tokens=False)
    assert answer.choices[0].token_ids == [*expected, cluster.eos]
    assert answer.prompt_token_ids == list(cluster.prefill.seen[0].context_token_ids)
    stream = await chat(client, stream=True, extra_body={"return_token_ids": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    choices = [chunk.choices[0] for chunk in chunks]
    streamed = [i for choice in choices for i in getattr(choice, "token_ids", [])]
    assert streamed == answer.choices[0].token_ids
    assert "".join(choice.delta.content or "" for choice in choices) == ANSWER


async def test_decode_may_speak_before_prefill_answered(client, cluster: Cluster) -> None:
    cluster.prefill.close_first = True
    cluster.prefill.run_s = 0.05
    answer = await chat(client)
    assert answer.choices[0].message.content == ANSWER


async def test_repeated_tokens_are_dropped(client, cluster: Cluster) -> None:
    cluster.decode.repeat_tokens = True
    answer = await chat(client, logprobs=True)
    assert answer.choices[0].message.content == ANSWER
    assert len(answer.choices[0].logprobs.content) == cluster.num_answer_tokens
