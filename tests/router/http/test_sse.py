"""The bytes of a stream: framing, headers, keep-alive, the end."""

from __future__ import annotations

import aiohttp
import orjson
from hypothesis import given
from hypothesis import strategies as st

from router.http.wire import sse
from tests.router.conftest import ANSWER, MODEL, Cluster, StartRouter

BODY = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 100}


def payloads(raw: bytes) -> list[object]:
    """The events of a whole stream; fails on anything that is no event."""
    assert raw.endswith(b"data: [DONE]\n\n")
    events = raw.split(b"\n\n")[:-2]
    assert all(event.startswith(b"data: {") and b"\n" not in event for event in events)
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


async def test_framing_and_headers(http: aiohttp.ClientSession, cluster: Cluster) -> None:
    async with http.post("/v1/completions", json=BODY) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["x-request-id"].startswith("req-")
        raw = await response.read()
    events = payloads(raw)
    assert "".join(event["choices"][0]["text"] for event in events) == ANSWER
    assert all("usage" not in event for event in events)


async def test_the_first_token_is_sent_before_decode_starts(http, cluster: Cluster) -> None:
    cluster.decode.hold_after = 1
    async with http.post("/v1/completions", json=BODY) as response:
        line = await response.content.readline()
        first = orjson.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
        assert first
        assert ANSWER.startswith(first)


async def test_tokens_that_come_together_are_one_write(http, cluster: Cluster) -> None:
    cluster.decode.burst = True
    async with http.post("/v1/completions", json=BODY) as response:
        # The transfer coding's chunks are the server's writes.
        writes = [data async for data, ends in response.content.iter_chunks() if ends]
    events = payloads(b"".join(writes))
    assert len(events) > 10
    assert len(writes) <= 2


async def test_a_long_wait_is_filled_with_comments(start_router: StartRouter) -> None:
    """Which no client takes for anything: the SDK's events are those of the answer alone."""
    import openai

    cluster = await start_router(keep_alive_s=0.05)
    await cluster.add_pair()
    cluster.prefill.run_s = 0.3
    async with (
        aiohttp.ClientSession(cluster.url) as http,
        http.post("/v1/completions", json=BODY) as response,
    ):
        raw = await response.read()
    assert raw.count(b": keep-alive\n\n") >= 3
    events = payloads(raw.replace(b": keep-alive\n\n", b""))
    assert "".join(event["choices"][0]["text"] for event in events) == ANSWER
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        messages = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_template_renders_what_json_would(text: str) -> None:
    template = sse.TextEvent({"a": [{"text": sse.TextEvent.HOLE}], "b": "x"})
    rendered = template.fill(text)
    assert rendered == sse.event({"a": [{"text": text}], "b": "x"})
    assert rendered.count(b"\n") == 2
