"""``/generate`` over HTTP, and its translation into a completion."""

from __future__ import annotations

import itertools

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.apis.generate import GenerateRequest, as_completion, names_of
from router.http.openai.schema import CompletionRequest, validated
from runtime.errors import PeerLostError
from tests.router.conftest import ANSWER, Cluster
from tests.router.http.test_operations import metric_values
from tests.router.http.test_sse import payloads
from tests.waiting import until

BENCH = {
    "sampling_params": {"temperature": 0.0, "max_new_tokens": 100, "ignore_eos": False},
    "return_logprob": False,
    "logprob_start_len": -1,
    "lora_path": None,
    "image_data": None,
}
"""What SGLang's own benchmark sends beside the prompt."""


async def generate(http: aiohttp.ClientSession, **body: object) -> tuple[int, object]:
    async with http.post("/generate", json=body) as response:
        return response.status, orjson.loads(await response.read())


async def test_an_answer(http, cluster: Cluster) -> None:
    status, answer = await generate(http, text="fox", **BENCH)
    assert status == 200
    ids = cluster.tokenizer.encode(ANSWER, add_special_tokens=False)
    prompt = cluster.tokenizer.encode("fox", add_special_tokens=True)
    assert answer["text"] == ANSWER
    assert answer["output_ids"] == [*ids, cluster.eos]
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": cluster.eos}
    assert meta["prompt_tokens"] == len(prompt)
    assert meta["completion_tokens"] == cluster.num_answer_tokens
    assert meta["cached_tokens"] == len(prompt) // 2
    assert meta["e2e_latency"] > 0
    assert list(cluster.prefill.seen[0].context_token_ids) == prompt
    values = await metric_values(http)
    assert (
        values["pd_router_requests_total{endpoint=/generate,model=org/tiny-model,status=200}"] == 1
    )
    assert values["pd_e2e_seconds_count{model=org/tiny-model}"] == 1


async def test_a_stream_repeats_the_text_so_far(http, cluster: Cluster) -> None:
    body = {"input_ids": [40, 41, 42], "stream": True, "rid": "mine", **BENCH}
    async with http.post("/generate", json=body) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        events = payloads(await response.read())
    texts = [event["text"] for event in events]
    assert len(texts) > 5
    assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
    assert texts[-1] == ANSWER
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * len(texts[1:])
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    assert {event["meta_info"]["id"] for event in events} == {"mine"}
    assert list(cluster.prefill.seen[0].context_token_ids) == [40, 41, 42]


async def test_several_prompts_and_choices_are_a_list(http, cluster: Cluster) -> None:
    sampling = {"n": 2, "max_new_tokens": 3}
    _, answers = await generate(http, text=["a", "b"], sampling_params=sampling)
    assert len(answers) == 4
    assert {a["meta_info"]["finish_reason"]["type"] for a in answers} == {"length"}
    assert all(a["meta_info"]["finish_reason"]["length"] == 3 for a in answers)
    assert len({a["meta_info"]["id"] for a in answers}) == 4
    _, answers = await generate(http, input_ids=[[40]], sampling_params={"max_new_tokens": 1})
    assert len(answers) == 1
    body = {"text": ["a", "b"], "stream": True}
    async with http.post("/generate", json=body) as response:
        events = payloads(await response.read())
    for index in (0, 1):
        assert [e["text"] for e in events if e["index"] == index][-1] == ANSWER


async def test_a_stop_string_is_named(http, cluster: Cluster) -> None:
    sampling = {"stop": ["END", "never"], "max_new_tokens": 100}
    _, answer = await generate(http, text="x", sampling_params=sampling)
    assert answer["text"] == ANSWER[: ANSWER.index("END")]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}
    kept = {**sampling, "no_stop_trim": True}
    _, answer = await generate(http, text="x", sampling_params=kept)
    assert answer["text"] == ANSWER[: ANSWER.index("END") + 3]


async def test_log_probabilities(http, cluster: Cluster) -> None:
    wanted = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    prompt = [40, 41, 42]
    completion = {"prompt": prompt, "max_tokens": 4, "logprobs": 2, "echo": True}
    async with http.post("/v1/completions", json=completion) as response:
        expected = (await response.json())["choices"][0]["logprobs"]["token_logprobs"]
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4}, **wanted}
    for start, first in ((None, 3), (-1, 3), (0, 0), (2, 2), (3, 3)):
        _, answer = await generate(http, **body, logprob_start_len=start)
        meta = answer["meta_info"]
        before, after = meta["input_token_logprobs"], meta["output_token_logprobs"]
        assert [entry[1] for entry in before] == prompt[first:]
        assert [entry[1] for entry in after] == answer["output_ids"]
        assert [entry[0] for entry in (*before, *after)] == expected[first:]
        assert "".join(entry[2] for entry in after) == answer["text"]
        assert [len(tops) for tops in meta["output_top_logprobs"]] == [2] * 4
        tops = [tops if tops is None else len(tops) for tops in meta["input_top_logprobs"]]
        assert tops == [None, 2, 2][first:]
    async with http.post("/generate", json={**body, "stream": True}) as response:
        events = payloads(await response.read())
    found = [event["meta_info"]["output_token_logprobs"] for event in events]
    assert found[-1] == after
    assert all(later[: len(some)] == some for some, later in itertools.pairwise(found))
    _, answer = await generate(http, text="x", return_logprob=True)
    assert answer["meta_info"]["output_token_logprobs"][0][2] is None
    assert "output_top_logprobs" not in answer["meta_info"]
    _, answer = await generate(http, text="x", top_logprobs_num=3, logprob_start_len=0)
    assert "output_token_logprobs" not in answer["meta_info"]


async def test_a_failure_within_a_stream_is_told(http, cluster: Cluster) -> None:
    cluster.decode.fail_after = 3
    async with http.post("/generate", json={"text": "x", "stream": True, **BENCH}) as response:
        assert response.status == 200
        events = payloads(await response.read())
    assert events[-1]["error"]["code"] == "out_of_kv_blocks"


async def test_a_stream_goes_on_at_another_worker(http, cluster: Cluster) -> None:
    other = await cluster.add_decode("decode-1")
    await until(lambda: other.num_streams > 0)
    for decode in cluster.decodes:
        decode.fail_error, decode.fail_after = PeerLostError("gone"), 3
    async with http.post("/generate", json={"text": "x", "stream": True, **BENCH}) as response:
        events = payloads(await response.read())
    assert events[-1]["text"] == ANSWER
    assert sum(len(decode.seen) for decode in cluster.decodes) == 2


async def test_a_client_that_leaves_ends_its_request(cluster: Cluster) -> None:
    cluster.decode.hold_after = 2
    async with (
        aiohttp.ClientSession(cluster.url) as http,
        http.post("/generate", json={"text": "x", "stream": True}) as response,
    ):
        await response.content.readline()
    await until(lambda: len(cluster.decode.aborted) == 1)


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({}, "text", "neither"),
        ({"text": "x", "input_ids": [1]}, "text", "both"),
        ({"text": ""}, "text", "empty"),
        ({"text": 3}, "text", "3"),
        ({"input_ids": [10**7]}, "input_ids", "10000000"),
        ({"input_ids": [1] * 256}, "input_ids", "256 tokens"),
        ({"text": "x", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len", "-2"),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num", "20"),
        ({"text": "x", "token_ids_logprob": [1]}, "token_ids_logprob", "not supported"),
        ({"text": "x", "lora_path": "adapter"}, "lora_path", "not supported"),
        ({"text": "x", "image_data": ["a"]}, "image_data", "not supported"),
        ({"input_ids": ["a"]}, "input_ids[0]", "integer"),
        ({"input_ids": []}, "input_ids", "not empty"),
        ({"text": "x", "max_new_tokens": 3}, "max_new_tokens", "no field"),
        ({"text": "x", "sampling_params": [{}]}, "sampling_params", "object"),
        (
            {"text": "x", "sampling_params": {"regex": 3}},
            "sampling_params.regex",
            "string",
        ),
        (
            {"text": "x", "sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}},
            "sampling_params.ebnf",
            "so does regex",
        ),
        (
            {"text": "x", "sampling_params": {"max_tokens": 3}},
            "sampling_params.max_tokens",
            "no field",
        ),
        (
            {"text": "x", "sampling_params": {"max_new_tokens": 0}},
            "sampling_params.max_new_tokens",
            "sampling_params.max_new_tokens = 0",
        ),
        ({"text": "x", "sampling_params": {"top_p": 2}}, "sampling_params.top_p", "= 2"),
        (
            {"text": "x", "sampling_params": {"stop_token_ids": [10**7]}},
            "sampling_params.stop_token_ids",
            "10000000",
        ),
        ({"text": "x", "sampling_params": {"stop": [""]}}, "sampling_params.stop", "characters"),
        ({"text": "x", "sampling_params": {"n": 500}}, "sampling_params.n", "128"),
    ],
)
async def test_what_cannot_be_is_refused_under_the_clients_name(
    http, cluster: Cluster, body: dict[str, object], param: str, part: str
) -> None:
    status, answer = await generate(http, **body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert answer["error"]["message"].startswith(param)
    assert part in answer["error"]["message"]
    assert cluster.prefill.seen == []


NUMBERS = st.none() | st.integers(1, 5)
PROMPTS = st.text(max_size=3) | st.lists(st.text(max_size=3), min_size=1, max_size=3)


@given(
    text=PROMPTS,
    sampling=st.fixed_dictionaries(
        {},
        optional={
            "max_new_tokens": NUMBERS,
            "min_new_tokens": NUMBERS,
            "n": NUMBERS,
            "sampling_seed": NUMBERS,
            "temperature": st.none() | st.floats(0, 2),
            "stop": st.none() | st.text(max_size=3) | st.lists(st.text(max_size=3)),
            "stop_token_ids": st.none() | st.lists(st.integers(0, 9)),
            "no_stop_trim": st.none() | st.booleans(),
            "ignore_eos": st.none() | st.booleans(),
        },
    ),
    stream=st.none() | st.booleans(),
)
def test_a_translation_loses_nothing_and_is_read_back(
    text: str | list[str], sampling: dict[str, object], stream: bool | None
) -> None:
    fields = {"text": text, "sampling_params": sampling, "stream": stream}
    request = validated(fields, GenerateRequest)
    completion = as_completion(request)
    assert completion.prompt == ([text] if isinstance(text, str) else text)
    assert bool(completion.stream) == bool(stream)
    names = names_of(request)
    given_fields = {name for name, value in sampling.items() if value is not None}
    told = {names[f].rpartition(".")[2] for f in completion.model_fields_set if f in names}
    assert given_fields <= told | {"stop"}
    for ours, theirs in names.items():
        name = theirs.rpartition(".")[2]
        if sampling.get(name) is not None and name != "stop":
            assert getattr(completion, ours) == sampling[name]
    forms = {"json_schema", "regex", "ebnf"}  # extra fields of a completion, as of SGLang's
    assert set(names) - forms <= set(CompletionRequest.model_fields)
    assert request.is_list == (isinstance(text, list) or (sampling.get("n") or 1) > 1)
