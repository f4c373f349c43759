"""What is refused before anything is tokenized, and how long that takes at the most."""

from __future__ import annotations

import io
import time
from typing import Any

import aiohttp
import orjson
import pytest

from router.errors import RequestError
from router.http.openai.schema import (
    MAX_DEPTH,
    MAX_PARTS,
    ChatRequest,
    CompletionRequest,
    parse_body,
)
from router.text.tokenizer import Tokenizer
from tests.router.conftest import MODEL, Cluster, StartRouter

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def refused(cluster: Cluster, path: str, body: object) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession(cluster.url) as http,
        http.post(path, data=io.BytesIO(orjson.dumps(body))) as response,
    ):
        answer = await response.json()
        assert response.status == 400, answer
        error: dict[str, Any] = answer["error"]
        return error


@pytest.fixture
def no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*args: object, **options: object) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(Tokenizer, "encode_all", encode)


async def test_a_short_body_of_many_choices_is_refused_at_once(cluster: Cluster) -> None:
    body = {"model": MODEL, "prompt": ["a"] * 1024, "n": 128}
    began = time.perf_counter()
    error = await refused(cluster, "/v1/completions", body)
    assert time.perf_counter() - began < 5.0
    assert error["param"] == "prompt"
    assert "131072" in error["message"]
    assert "router.max_choices_per_request is 1024" in error["message"]


async def test_choices_of_all_prompts_are_counted_together(start_router: StartRouter) -> None:
    cluster = await start_router(max_choices_per_request=6)
    error = await refused(cluster, "/v1/completions", {"model": MODEL, "prompt": ["a"] * 2, "n": 4})
    assert error["param"] == "prompt"
    error = await refused(cluster, "/v1/chat/completions", {**CHAT, "n": 7})
    assert error["param"] == "n"


@pytest.mark.usefixtures("no_tokens")
async def test_what_can_never_fit_is_not_tokenized(cluster: Cluster) -> None:
    text = "x" * 2_000_000
    for path, body, param in (
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/completions", {"prompt": ["a", text]}, "prompt"),
        ("/v1/completions", {"prompt": [[1] * 300]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "<bos>" * 300}]},
            "messages",
        ),
    ):
        error = await refused(cluster, path, {"model": MODEL, **body})
        assert error["code"] == "context_length_exceeded", body
        assert error["param"] == param
        assert "256" in error["message"]


async def test_of_a_text_far_too_long_only_the_beginning_is_tokenized(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_all = Tokenizer.encode_all
    lengths: list[int] = []

    def encode(self: Tokenizer, texts: list[str], **options: Any) -> list[list[int]]:
        lengths.extend(map(len, texts))
        return encode_all(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "encode_all", encode)
    text = "abc " * 650  # more than the usual characters of a context, and fewer than the most
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        error = await refused(cluster, path, {"model": MODEL, **body})
        assert error["code"] == "context_length_exceeded"
        assert "at least" in error["message"]
    assert lengths == []


@pytest.mark.parametrize("depth", [MAX_DEPTH + 5, 600, 900])
async def test_json_nested_deep_is_refused_by_the_field(cluster: Cluster, depth: int) -> None:
    data = b'{"a":' * depth + b"1" + b"}" * depth
    for field in ("chat_template_kwargs", "tools", "metadata"):
        body = orjson.dumps(CHAT)[:-1] + b',"' + field.encode() + b'":' + data + b"}"
        async with (
            aiohttp.ClientSession(cluster.url) as http,
            http.post("/v1/chat/completions", data=body) as response,
        ):
            error = (await response.json())["error"]
            assert response.status == 400
            assert error["param"] == field
            assert "nested too deep" in error["message"]


def test_a_body_of_too_many_parts_is_not_parsed() -> None:
    body = b'{"messages": [' + b"{}," * MAX_PARTS + b"{}]}"
    with pytest.raises(RequestError, match=f"at most {MAX_PARTS}"):
        parse_body(body, ChatRequest)


def test_text_and_ids_of_many_are_parsed() -> None:
    text = '{"a": "b", ' * 60_000
    assert parse_body(orjson.dumps({"prompt": text}), CompletionRequest).prompt == [text]
    ids = list(range(500_000))
    assert parse_body(orjson.dumps({"prompt": ids}), CompletionRequest).prompt == [ids]
