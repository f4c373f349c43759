"""Keys over HTTP, asked for by the OpenAI SDK: who is let in, and what the others are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import openai
import pytest

from router.http.access.rate_limits import duration_text
from router.keys.file import add_to_file, remove_from_file
from router.keys.record import KeyLimits, KeyRecord, hash_key, new_key
from router.keys.source import KEYS_VARIABLE
from runtime.rpc.renewal import CHECK_S
from tests.router.conftest import MODEL, Cluster, StartRouter
from tests.waiting import until

BODY = {"model": MODEL, "prompt": "the quick brown fox", "max_tokens": 4, "temperature": 0}
Sdk = Callable[[Cluster, str], Awaitable[openai.AsyncOpenAI]]


@pytest.fixture
async def sdk() -> AsyncIterator[Sdk]:
    async with AsyncExitStack() as stack:

        async def make(cluster: Cluster, key: str) -> openai.AsyncOpenAI:
            client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=key, max_retries=0)
            return await stack.enter_async_context(client)

        yield make


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def add(
    path: Path, name: str, *, models: tuple[str, ...] = (), salt: str = "", **limits: int
) -> str:
    """A new key of the file."""
    key = new_key()
    record = KeyRecord(
        name=name,
        sha256=hash_key(key),
        models=models,
        cache_salt=salt,
        limits=KeyLimits(**limits),
    )
    add_to_file(path, record)
    return key


async def with_workers(cluster: Cluster) -> Cluster:
    await cluster.add_pair()
    return cluster


async def metric(cluster: Cluster, line: str) -> float:
    """The value of a series; 0 where there is none."""
    async with aiohttp.ClientSession(cluster.url) as http, http.get("/metrics") as response:
        for each in (await response.text()).splitlines():
            if each.startswith(f"{line} "):
                return float(each.rpartition(" ")[2])
    return 0.0


async def until_metric(cluster: Cluster, line: str, value: float) -> None:
    async with asyncio.timeout(60):
        while await metric(cluster, line) != value:
            await asyncio.sleep(0.05)


async def test_without_a_key_that_is_known_nothing_is_served(
    start_router: StartRouter, keys_file: Path, sdk: Sdk
) -> None:
    key = add(keys_file, "alice")
    cluster = await with_workers(await start_router(keys_file=str(keys_file)))
    stranger = await sdk(cluster, "sk-of-nobody")
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: stranger.completions.create(**BODY),
        lambda: stranger.models.list(),
        lambda: stranger.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        ),
    ]
    for call in calls:
        with pytest.raises(openai.AuthenticationError) as caught:
            await call()
        assert caught.value.code == "invalid_api_key"
        assert caught.value.type == "authentication_error"
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        assert "sk-of-nobody" not in caught.value.message
        assert "Fix: " in caught.value.message
    assert not cluster.prefill.seen
    alice = await sdk(cluster, key)
    assert (await alice.completions.create(**BODY)).choices[0].text == cluster.text_of(4)
    assert [model.id async for model in alice.models.list()] == [MODEL]
    assert await metric(cluster, 'pd_router_key_requests_total{key="",outcome="unknown"}') == 3
    assert await metric(cluster, 'pd_router_request_errors_total{code="invalid_api_key"}') == 3


async def test_a_key_comes_as_a_bearer_or_by_itself(
    start_router: StartRouter, keys_file: Path
) -> None:
    key = add(keys_file, "alice")
    cluster = await start_router(keys_file=str(keys_file))
    headers = [
        ({"Authorization": f"Bearer {key}"}, 200),
        ({"Authorization": f"bearer  {key} "}, 200),
        ({"x-api-key": key}, 200),
        ({"Authorization": key}, 401),
        ({"Authorization": f"Basic {key}"}, 401),
        ({"Authorization": f"Bearer {key}x"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer \u00ff\u00fe"}, 401),
        ({}, 401),
    ]
    async with aiohttp.ClientSession(cluster.url) as http:
        for each, status in headers:
            async with http.get("/v1/models", headers=each) as response:
                assert response.status == status, each


async def test_every_api_asks_for_a_key_and_tells_so_in_its_own_way(
    start_router: StartRouter, keys_file: Path
) -> None:
    key, other = add(keys_file, "alice"), add(keys_file, "bob", models=("another",))
    section = {"keys_file": str(keys_file), "cors_origins": "https://chat.example"}
    cluster = await with_workers(await start_router(**section))
    message = {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    calls: list[tuple[str, str, object]] = [
        ("POST", "/v1/messages", message),
        ("POST", "/v1/messages/count_tokens", {"messages": message["messages"]}),
        ("POST", "/v1/responses", {"input": "hi", "max_output_tokens": 4}),
        ("POST", "/v1/responses/input_tokens", {"input": "hi"}),
        ("POST", "/generate", {"text": "x"}),
        ("POST", "/tokenize", {"prompt": "x"}),
        ("POST", "/detokenize", {"tokens": [40]}),
        ("GET", "/server_info", None),
    ]
    async with aiohttp.ClientSession(cluster.url) as http:
        for method, path, body in calls:
            for sent, status in (("", 401), (other, 403), (key, 200)):
                headers = {"x-api-key": sent} if sent else {}
                async with http.request(method, path, json=body, headers=headers) as response:
                    assert (path, response.status) == (path, status)
                    if path.startswith("/v1/messages") and status != 200:
                        kind = {401: "authentication_error", 403: "permission_error"}[status]
                        assert (await response.json())["error"]["type"] == kind
        # A browser asks without the key whether it may send one.
        asks = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
        async with http.options("/v1/messages", headers=asks) as response:
            assert response.status == 204
    line = 'pd_router_key_tokens_total{key="alice",kind="output"}'
    assert await metric(cluster, line) == 4 + 4 + cluster.num_answer_tokens


async def test_probes_and_by_default_prometheus_need_no_key(
    start_router: StartRouter, keys_file: Path
) -> None:
    add(keys_file, "alice")
    cluster = await with_workers(await start_router(keys_file=str(keys_file)))
    closed = ("/v1/models", "/v1", "/nothing", "/console/x", "/status/", "/v1/models/x")
    async with aiohttp.ClientSession(cluster.url) as http:
        for path in ("/health", "/ready", "/metrics", "/targets"):
            async with http.get(path) as response:
                assert response.status == 200, path
        for path in ("/status", "/console", "/console/data", *closed):
            async with http.get(path) as response:
                assert response.status == 401, path


async def test_a_key_may_use_its_models_only(
    start_router: StartRouter, keys_file: Path, sdk: Sdk
) -> None:
    keys = (
        add(keys_file, "alice", models=("other", MODEL)),
        add(keys_file, "bob", models=("other",)),
    )
    cluster = await with_workers(await start_router(keys_file=str(keys_file)))
    alice, bob = [await sdk(cluster, key) for key in keys]
    await alice.completions.create(**BODY)
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await bob.completions.create(**BODY)
    assert caught.value.code == "model_not_allowed"
    assert caught.value.param == "model"
    assert "other" in caught.value.message
    with pytest.raises(openai.PermissionDeniedError):
        await bob.models.retrieve(MODEL)
    assert [model.id async for model in bob.models.list()] == []
    assert len(cluster.prefill.seen) == 1
    assert await metric(cluster, 'pd_router_key_requests_total{key="bob",outcome="model"}') == 2


async def test_requests_of_a_minute_are_limited_as_openai_does(
    start_router: StartRouter, keys_file: Path, sdk: Sdk
) -> None:
    key = add(keys_file, "alice", requests_per_minute=2)
    cluster = await with_workers(await start_router(keys_file=str(keys_file)))
    alice = await sdk(cluster, key)
    for left in (1, 0):
        answer = await alice.completions.with_raw_response.create(**BODY)
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
        assert "x-ratelimit-limit-tokens" not in answer.headers
    with pytest.raises(openai.RateLimitError) as caught:
        await alice.completions.create(**BODY)
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.type == "rate_limit_error"
    headers = caught.value.response.headers
    assert 1 <= int(headers["retry-after"]) <= 30
    assert 0 < int(headers["retry-after-ms"]) <= 30_000
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert len(cluster.prefill.seen) == 2
    # What costs no model is not counted.
    await alice.models.list()
    name = 'pd_router_key_requests_total{key="alice",outcome="requests_per_minute"}'
    assert await metric(cluster, name) == 1


async def test_tokens_are_charged_when_a_request_has_ended(
    start_router: StartRouter, keys_file: Path, sdk: Sdk
) -> None:
    limit = 100_000
    key = add(keys_file, "alice", tokens_per_minute=limit)
    cluster = await with_workers(await start_router(keys_file=str(keys_file)))
    alice = await sdk(cluster, key)
    stream = await alice.completions.create(
        **{**BODY, "max_tokens": 200, "n": 2}, stream=True, stream_options={"include_usage": True}
    )
    usage = [chunk.usage async for chunk in stream][-1]
    assert usage is not None
    prompt = usage.prompt_tokens
    answer = await alice.completions.with_raw_response.create(**{**BODY, "max_tokens": 1})
    left = int(answer.headers["x-ratelimit-remaining-tokens"])
    # Of the two choices each was taken for 200; what is charged is what they had.
    assert left >= limit - usage.total_tokens - 100
    assert answer.headers["x-ratelimit-limit-tokens"] == str(limit)
    for kind, number in (("prompt", 2 * prompt), ("output", usage.completion_tokens + 1)):
        name = f'pd_router_key_tokens_total{{key="alice",kind="{kind}"}}'
        assert await metric(cluster, name) == number


async def test_a_key_without_tokens_left_is_told_when_to_come_back(
    start_router: StartRouter, keys_file: Path, sdk: Sdk
) -> None:
    key = add(keys_file, "alice", tokens_per_minute=20)
    cluster = await with_workers(await start_router(keys_file=str(keys_file)))
    alice = await sdk(cluster, key)
    # Six minutes' worth: refused it is not, and what comes after it waits.
    long = {**BODY, "max_tokens": 120}
    await alice.completions.create(**long, extra_body={"ignore_eos": True})
    with pytest.raises(openai.RateLimitError) as caught:
        await alice.completions.create(**BODY)
    assert "tokens_per_minute" in caught.value.message
    assert caught.value.response.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_a_key_has_so_many_requests_at_once_and_its_place_comes_back(
    start_router: StartRouter, keys_file: Path, sdk: Sdk
) -> None:
    key = add(keys_file, "alice", max_concurrent_requests=1)
    cluster = await with_workers(await start_router(keys_file=str(keys_file)))
    alice = await sdk(cluster, key)
    cluster.prefill.holds_runs = True
    first = asyncio.create_task(alice.completions.create(**BODY))
    await until(lambda: len(cluster.prefill.seen) == 1)
    with pytest.raises(openai.RateLimitError, match="max_concurrent_requests") as caught:
        await alice.completions.create(**BODY)
    assert caught.value.response.headers["retry-after"] == "1"
    first.cancel()  # its client goes away
    await until(lambda: len(cluster.prefill.cancelled) == 1)
    cluster.prefill.holds_runs = False
    await alice.completions.create(**BODY)


async def test_tenants_share_no_cached_prefix(
    start_router: StartRouter, keys_file: Path, sdk: Sdk
) -> None:
    """The salt of block hashes, as prefill and decode get it."""
    names = ("alice", "bob", "carol")
    keys = [add(keys_file, name, salt="bob" if name == "carol" else "") for name in names]
    cluster = await with_workers(await start_router(keys_file=str(keys_file)))
    salts = {}
    for name, key in zip(names, keys, strict=True):
        client = await sdk(cluster, key)
        for own in ("", "alice", "x"):
            await client.completions.create(**BODY, extra_body={"cache_salt": own} if own else {})
            run, reserve = cluster.prefill.seen[-1], cluster.decode.seen[-1]
            assert run.cache_salt == reserve.cache_salt
            salts[name, own] = run.cache_salt
    assert all(salts[name, ""] for name in names)
    of_bob = [salts["bob", own] for own in ("", "alice", "x")]
    assert of_bob == [salts["carol", own] for own in ("", "alice", "x")]
    assert len(set(salts.values())) == 6


async def test_without_keys_a_request_has_the_salt_it_brings(cluster: Cluster, sdk: Sdk) -> None:
    client = await sdk(cluster, "whatever")
    await client.completions.create(**BODY)
    await client.completions.create(**BODY, extra_body={"cache_salt": "mine"})
    first, second = (run.cache_salt for run in cluster.prefill.seen)
    assert first == ""
    assert second.endswith("mine")


async def test_a_file_that_changes_is_followed_and_a_broken_one_is_not(
    start_router: StartRouter,
    keys_file: Path,
    sdk: Sdk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("runtime.rpc.renewal.CHECK_S", 0.0)
    first = add(keys_file, "alice")
    cluster = await with_workers(await start_router(keys_file=str(keys_file)))
    second = add(keys_file, "bob")
    alice, bob = await sdk(cluster, first), await sdk(cluster, second)
    async with asyncio.timeout(CHECK_S + 60):
        while True:  # the first look is due as it was at the start
            try:
                await bob.models.list()
                break
            except openai.AuthenticationError:
                await asyncio.sleep(0.05)
    await until_metric(cluster, "pd_router_keys", 2)
    whole = keys_file.read_text()
    keys_file.write_text(whole + "[keys.carol]\nsha256 = ")
    await bob.models.list()
    await alice.models.list()
    await until(lambda: "list of API keys stays in use" in caplog.text)
    await until_metric(cluster, "pd_router_keys_stale", 1)
    keys_file.write_text(whole)
    remove_from_file(keys_file, "alice")
    with pytest.raises(openai.AuthenticationError):
        await alice.models.list()
    await bob.models.list()
    await until_metric(cluster, "pd_router_keys_stale", 0)


async def test_keys_may_come_from_the_environment(
    start_router: StartRouter, keys_file: Path, sdk: Sdk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "ci=0123456789abcdef0123, bob=abcdef0123456789abcd")
    of_file = add(keys_file, "alice")
    cluster = await start_router(keys_file=str(keys_file))
    for key in (of_file, "0123456789abcdef0123", "abcdef0123456789abcd"):
        await (await sdk(cluster, key)).models.list()
    with pytest.raises(openai.AuthenticationError):
        await (await sdk(cluster, "0123456789abcdef012")).models.list()


async def test_each_request_is_one_line_of_the_log_without_its_key(
    start_router: StartRouter, keys_file: Path, sdk: Sdk, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [
        add(keys_file, "alice", requests_per_minute=1),
        add(keys_file, "bob", models=("other",)),
        "sk-of-nobody",
    ]
    cluster = await with_workers(await start_router(keys_file=str(keys_file)))
    caplog.set_level(logging.INFO, logger="router.http.access.gate")
    clients = [await sdk(cluster, key) for key in keys]
    await clients[0].completions.create(**BODY)
    for client in clients:
        with pytest.raises(openai.APIStatusError):
            await client.completions.create(**BODY)
    lines = [
        record.getMessage() for record in caplog.records if record.name == "router.http.access.gate"
    ]
    # At its start it also says that nobody may see the console.
    lines = [line for line in lines if line.startswith("key=")]
    said = [line.partition(" method=")[0] for line in lines]
    assert said == [
        "key=alice verdict=admitted status=200",
        "key=alice verdict=requests_per_minute status=429",
        "key=bob verdict=model status=403",
        "key=- verdict=unknown status=401",
    ]
    assert "path=/v1/completions" in lines[0]
    assert "output_tokens=4" in lines[0]
    assert not any(key in caplog.text or hash_key(key) in caplog.text for key in keys)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0201, "21ms"), (1.0, "1s"), (1.25, "1.25s"), (60, "1m0s"), (361.5, "6m1.5s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
