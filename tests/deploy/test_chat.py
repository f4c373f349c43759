"""``tandem chat`` against a stand-in for the router's HTTP side."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from deploy.cli import main
from deploy.clients.openai_client import Server
from deploy.commands.cluster.chat import Talk
from deploy.errors import ClusterError


@dataclass(slots=True)
class FakeServer:
    """Says each word of the last message; remembers what it was sent, and who went away."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake-model"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        text = body["messages"][-1]["content"]
        if text == "refuse":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n')
        if text == "think":
            thought = b'{"choices": [{"delta": {"reasoning": "hm", "reasoning_content": "hm"}}]}'
            await response.write(b"data: " + thought + b"\n\n")
        for word in text.split():
            chunk = '{"choices": [{"delta": {"content": "<' + word + '>"}}]}'
            await response.write(f"data: {chunk}\n\n".encode())
        if text == "for ever":
            try:
                await asyncio.sleep(600)
            finally:
                self.gone.set()
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """In a thread of its own: the command under test blocks."""
    fake, loop = FakeServer(), asyncio.new_event_loop()
    app = web.Application()
    app.add_routes([web.get("/v1/models", fake.models)])
    app.add_routes([web.post("/v1/chat/completions", fake.chat)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    port = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    fake.url = f"http://127.0.0.1:{port}/v1"
    yield fake
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def said(body: dict[str, Any]) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in body["messages"]]


def test_a_talk_remembers_until_it_is_reset(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "one\n\n refuse \ntwo\n/reset\nthree\n/exit\nfour\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    words = ["chat", "--url", server.url, "--system", "Be short.", "--max-tokens", "5"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out.split() == ["<one>", "<two>", "(forgotten)", "<three>"]
    assert captured.err == "\nerror: too long\n"
    first, refused, second, third = server.bodies
    assert first["model"] == "fake-model"
    assert first["max_tokens"] == 5
    assert said(first) == ["system: Be short.", "user: one"]
    assert said(refused)[-1] == "user: refuse"
    assert said(second) == [*said(first), "assistant: <one>", "user: two"]
    assert said(third) == ["system: Be short.", "user: three"]


def test_the_end_of_the_input_ends_the_talk(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--url", server.url]) == 0
    assert server.bodies == []


def test_ctrl_c_cuts_the_answer_short_and_the_talk_goes_on(server: FakeServer) -> None:
    talk = Talk(Server(endpoint=server.url), {"model": "m"})
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        if text == "<ever>":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.ask("for ever", show)
    assert server.gone.wait(60), "the server was not told"
    talk.ask("go on", shown.append)
    assert "".join(shown) == "<for><ever><go><on>"
    assert said(server.bodies[-1]) == ["user: for ever", "assistant: <for><ever>", "user: go on"]


def test_reasoning_is_shown_and_not_remembered(server: FakeServer) -> None:
    talk = Talk(Server(endpoint=server.url), {"model": "m"})
    shown: list[str] = []
    talk.ask("think", shown.append)
    assert "".join(shown) == "hm\n\n<think>"
    assert talk.said[-1] == {"role": "assistant", "content": "<think>"}


def test_a_message_that_is_not_answered_was_not_said(server: FakeServer) -> None:
    talk = Talk(Server(endpoint=server.url), {"model": "m"})
    with pytest.raises(ClusterError, match="too long"):
        talk.ask("refuse", lambda text: None)
    assert talk.said == []


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[" * 100_000,
        b"[]",
        b'{"choices": 3}',
        b'{"choices": [{"delta": []}]}',
        b'{"choices": [{"delta": {"content": 3}}]}',
        b'{"error": "none"}',
    ],
    ids=lambda data: repr(data)[:40],
)
def test_what_is_no_answer_is_told(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def answered(*_: object) -> Iterator[io.BytesIO]:
        yield io.BytesIO(b"data: " + data + b"\n\n")

    monkeypatch.setattr(Server, "_call", answered)
    texts = Server(endpoint="http://h/v1").stream_chat({})
    with pytest.raises(ClusterError, match="no answer of this API"):
        list(texts)
    monkeypatch.setattr(Server, "_call", lambda *_: contextlib.nullcontext(io.BytesIO(data)))
    with pytest.raises(ClusterError, match="no answer of this API"):
        Server(endpoint="http://h/v1").served_model()
