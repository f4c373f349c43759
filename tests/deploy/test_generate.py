"""``tandem generate`` against a stand-in for the router's HTTP side."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web

from deploy.cli import main
from tests.deploy.fake_role import complete


async def models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "fake-model"}]})


async def no_models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": []})


async def guarded(request: web.Request) -> web.StreamResponse:
    if request.headers.get("Authorization") != "Bearer sk-of-tests":
        return web.json_response({"error": {"message": "a key is needed"}}, status=401)
    return await complete(request)


@pytest.fixture
def url() -> Iterator[str]:
    """A server in a thread of its own: the command under test blocks."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    app.add_routes([web.post("/guarded/v1/completions", guarded)])
    app.add_routes([web.get("/starting/v1/models", no_models)])
    runner = web.AppRunner(app)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    port = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    yield f"http://127.0.0.1:{port}/v1"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_key_of_the_environment_is_shown(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [f"{url.removesuffix('/v1')}/guarded/v1", "--model", "fake-model"]
    assert main(["generate", "def f(n):", "--url", *asked]) == 1
    assert "a key is needed" in capsys.readouterr().err
    monkeypatch.setenv("TANDEM_API_KEY", "sk-of-tests")
    assert main(["generate", "def f(n):", "--url", *asked]) == 0
    assert capsys.readouterr().out == "def f(n):<def><f(n):>\n"


def test_prompt_and_completion_are_printed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    # The base address works without /v1, too.
    assert main(["generate", "def f(n):", "--url", url.removesuffix("/v1"), "--seed", "1"]) == 0
    assert capsys.readouterr().out == "def f(n):<def><f(n):>\n"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: must not be empty"),
        ("fail", "the worker died"),
        ("break", "ended the stream before the answer was over"),
    ],
)
def test_failures_are_one_line(
    prompt: str, message: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", prompt, "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_prompt_from_a_pipe_comes_without_the_newline_of_the_shell(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(n):\n\n"))
    assert main(["generate", "-", "--url", url]) == 0
    assert capsys.readouterr().out == "def f(n):\n<def><f(n):>\n"


def test_nothing_is_printed_of_a_request_that_is_refused(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", "--url", url.replace("/v1", "/nothing"), "--model", "m"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "HTTP 404" in captured.err


def test_a_model_that_ends_without_a_text_is_told(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", " ", "--url", url]) == 0
    captured = capsys.readouterr()
    assert captured.out == " \n"
    assert captured.err == "the model ended without a text\n"


def test_a_cluster_that_is_starting_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--url", url.replace("/v1", "/starting/v1")]) == 1
    assert "no model is served yet" in capsys.readouterr().err
