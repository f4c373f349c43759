"""Bad input: each case is answered with status, field and fix, and no worker hears of it."""

from __future__ import annotations

import io

import aiohttp
import openai
import orjson
import pytest

from router.errors import RequestError, TooManyRequestsError
from router.http.errors import failure_from
from runtime.errors import ERRORS_BY_CODE, ErrorCode
from tests.router.conftest import MODEL, Cluster, StartRouter
from tests.waiting import until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": MODEL, "prompt": "hi"}

BAD_CHATS = [
    ({"model": "other"}, 404, "model", "other"),
    ({"messages": []}, 400, "messages", "at least one"),
    ({"messages": "hi"}, 400, "messages", "list"),
    ({"messages": None}, 400, "messages", "list"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role", "robot"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content", "a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content[0]",
        "image_url",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].tool_call_id", "string"),
    ({"messages": [{"role": "user", "content": "a b c " * 200}]}, 400, "messages", "256"),
    ({"temperature": 2.5}, 400, "temperature", "2.5"),
    ({"temperature": -0.1}, 400, "temperature", "0"),
    ({"temperature": "hot"}, 400, "temperature", "number"),
    ({"temperature": True}, 400, "temperature", "number"),
    ({"top_p": 0}, 400, "top_p", "above 0"),
    ({"top_k": -2}, 400, "top_k", "-2"),
    ({"min_p": 1.5}, 400, "min_p", "1.5"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", "above 0"),
    ({"presence_penalty": 3}, 400, "presence_penalty", "3"),
    ({"n": 0}, 400, "n", "n = 0"),
    ({"n": 1000}, 400, "n", "128"),
    ({"n": 1.5}, 400, "n", "integer"),
    ({"max_tokens": 0}, 400, "max_tokens", "max_tokens = 0"),
    ({"max_completion_tokens": -5}, 400, "max_completion_tokens", "-5"),
    ({"max_tokens": "many"}, 400, "max_tokens", "'many'"),
    ({"min_tokens": 5, "max_tokens": 3}, 400, "min_tokens", "from 0 to 3"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20"),
    ({"stop": [""]}, 400, "stop", "characters"),
    ({"stop": [3]}, 400, "stop", "string"),
    ({"stop": ["x"] * 65}, 400, "stop", "64"),
    ({"stop_token_ids": [10**6]}, 400, "stop_token_ids", "1000000"),
    ({"stop_token_ids": [1, "a"]}, 400, "stop_token_ids[1]", "integer"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias", "token id"),
    ({"logit_bias": {"999999": 1}}, 400, "logit_bias", "999999"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias[5]", "101"),
    ({"stream": "yes"}, 400, "stream", "true or false"),
    ({"stream_options": 1}, 400, "stream_options", "object"),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type", "xml"),
    ({"tool_choice": "required", "tools": []}, 400, "tool_choice", "required"),
    ({"modalities": ["audio"]}, 400, "modalities", "audio"),
    ({"guided_regex": "(?=a)"}, 400, "guided_regex", "Lookahead"),
]
BAD_COMPLETIONS = [
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": []}, 400, "prompt", "not empty"),
    ({"prompt": [[]]}, 400, "prompt", "empty"),
    ({"prompt": ["ok", ""]}, 400, "prompt", "empty"),
    ({"prompt": [1, "a"]}, 400, "prompt", "token ids"),
    ({"prompt": {"text": "x"}}, 400, "prompt", "string"),
    ({"prompt": [10**7]}, 400, "prompt", "10000000"),
    ({"prompt": [-1]}, 400, "prompt", "-1"),
    ({"prompt": [1] * 256}, 400, "prompt", "256 tokens"),
    ({"max_tokens": 0}, 400, "max_tokens", "from 1"),
    ({"logprobs": 30}, 400, "logprobs", "20"),
    ({"suffix": "end"}, 400, "suffix", "not supported"),
    ({"best_of": 4}, 400, "best_of", "n"),
]


async def refused(http: aiohttp.ClientSession, path: str, body: bytes, status: int) -> dict:
    async with http.post(
        path, data=io.BytesIO(body), headers={"x-request-id": "mine-1"}
    ) as response:
        answer = await response.json()
        assert response.status == status, answer
        assert response.headers["x-request-id"] == "mine-1"
        assert set(answer) == {"error"}
        error = answer["error"]
        assert error["type"] == "invalid_request_error"
        assert error["request_id"] == "mine-1"
        assert {"message", "type", "param", "code"} <= set(error)
        return error


async def test_bad_chats(http, cluster: Cluster) -> None:
    for change, status, param, text in BAD_CHATS:
        body = orjson.dumps({**CHAT, **change})
        error = await refused(http, "/v1/chat/completions", body, status)
        assert error["param"] == param, change
        assert text in error["message"], error
    assert cluster.decode.seen == []


async def test_bad_completions(http, cluster: Cluster) -> None:
    for change, status, param, text in BAD_COMPLETIONS:
        body = orjson.dumps({**COMPLETION, **change})
        error = await refused(http, "/v1/completions", body, status)
        assert error["param"] == param, change
        assert text in error["message"], error
    assert cluster.decode.seen == []


async def test_a_missing_field(http, cluster: Cluster) -> None:
    error = await refused(http, "/v1/completions", b'{"model": "org/tiny-model"}', 400)
    assert error["message"] == "prompt is missing. Fix: send it"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b'"text"', b'{"a": NaN}'])
async def test_bodies_that_are_no_json_object(http, cluster: Cluster, body: bytes) -> None:
    error = await refused(http, "/v1/chat/completions", body, 400)
    assert "JSON" in error["message"]


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00", r"\ude00\ud83d"])
async def test_half_a_character_is_refused_before_anything_is_answered(
    http, cluster: Cluster, half: str
) -> None:
    turn = f'"messages": [{{"role": "user", "content": "{half}"}}]'
    tool = f'{{"type": "function", "function": {{"name": "f", "description": "{half}"}}}}'
    for path, field in (
        ("/v1/chat/completions", turn),
        ("/v1/chat/completions", f'"messages": [], "tools": [{tool}]'),
        ("/v1/completions", f'"prompt": "x", "stop": ["{half}"]'),
        ("/v1/responses", f'"input": "{half}"'),
        ("/v1/messages", f'"max_tokens": 9, {turn}'),
    ):
        for stream in ("true", "false"):
            body = f'{{"model": "{MODEL}", {field}, "stream": {stream}}}'
            async with http.post(path, data=io.BytesIO(body.encode())) as response:
                assert response.status == 400, path
                assert "surrogate" in await response.text()
    assert cluster.prefill.seen == []


async def test_a_body_that_is_not_encoded_as_it_says(http, cluster: Cluster) -> None:
    headers = {"Content-Encoding": "gzip"}
    async with http.post("/v1/completions", data=b"plain", headers=headers) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert "Content-Encoding" in error["message"]


async def test_a_body_of_10_megabytes(http, cluster: Cluster) -> None:
    body = orjson.dumps({**COMPLETION, "prompt": "x" * 10_000_000})
    error = await refused(http, "/v1/completions", body, 413)
    assert "max_body_bytes" in error["message"]
    async with http.get("/health") as response:
        assert response.status == 200


async def test_unknown_urls_and_methods(http, cluster: Cluster) -> None:
    error = await refused(http, "/v2/nothing", b"{}", 404)
    assert error["code"] == "unknown_url"
    async with http.get("/v1/completions") as response:
        assert response.status == 405
        assert "POST" in (await response.json())["error"]["message"]


async def test_a_slash_at_the_end_of_a_path_changes_nothing(http, cluster: Cluster) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        async with http.post(path + "/", json=body) as response:
            assert response.status == 200
            assert (await response.json())["choices"]
    for path in ("/v1/models/", f"/v1/models/{MODEL}/", "/ready/?model=" + MODEL, "/health//"):
        async with http.get(path) as response:
            assert response.status == 200, path


async def test_the_sdk_sees_typed_errors(client, cluster: Cluster) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt="a " * 400)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="nope", prompt="a", stream=True)
    assert missing.value.code == "model_not_found"


async def test_who_waits_too_long_for_a_place_is_told_to_come_back(
    start_router: StartRouter,
) -> None:
    cluster = await start_router(max_concurrent_requests=1, queue_timeout_s=2.0)
    await cluster.add_prefill()
    decode = await cluster.add_decode()
    decode.hold_after = 1
    async with (
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client,
    ):
        first = await client.completions.create(model=MODEL, prompt="a", stream=True)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model=MODEL, prompt="a")
        assert caught.value.code == "rate_limit_exceeded"
        assert "router.queue_timeout_s" in caught.value.message
        assert int(caught.value.response.headers["retry-after"]) >= 1
        decode.hold_after = 0
        await first.close()
        await until(lambda: not decode.requests)
        answer = await client.completions.create(model=MODEL, prompt="a", n=3, max_tokens=2)
        assert len(answer.choices) == 3  # a request is admitted whole


async def test_no_workers(start_router: StartRouter) -> None:
    cluster = await start_router()
    async with aiohttp.ClientSession(cluster.url) as http:
        async with http.post("/v1/completions", json=COMPLETION) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
            error = (await response.json())["error"]
            assert error["code"] == "server_not_ready"
            assert "prefill" in error["message"]
        async with http.get("/ready") as response:
            assert response.status == 503
            assert len((await response.json())["missing"]) == 2
        await cluster.add_prefill()
        async with http.get("/ready") as response:
            assert (await response.json())["missing"] == ["no decode worker is ready"]
        await cluster.add_decode()
        async with http.get("/ready") as response:
            assert response.status == 200


def test_every_error_has_an_answer() -> None:
    for code, error_type in ERRORS_BY_CODE.items():
        failure = failure_from(error_type("text"))
        assert 400 <= failure.status < 600
        assert failure.message == "text"
        assert (failure.status == 400) == (code is ErrorCode.INVALID_REQUEST)
        # SDKs repeat 5xx answers by themselves unless told otherwise.
        if code in (ErrorCode.INTERNAL, ErrorCode.DEADLINE_EXCEEDED):
            assert failure.headers["x-should-retry"] == "false"
    assert failure_from(TooManyRequestsError("x")).status == 429
    assert failure_from(RequestError("x", param="p")).param == "p"
