"""What `helm test` runs is satisfied with an answer of both roles, and with no other."""

from __future__ import annotations

import json
import runpy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest

from tests.helm.rendering import CHART

SCRIPT = str(CHART / "files" / "completion.py")
TIMINGS = {"prefill_compute_s": 0.02, "kv_transfer_s": 0.001, "decode_admission_s": 0.003}
ANSWER: dict[str, Any] = {
    "usage": {"completion_tokens": 16},
    "choices": [{"text": " return n"}],
}


@contextmanager
def router(
    *,
    answer: object = ANSWER,
    status: int = 200,
    timings: object = TIMINGS,
    not_ready: int = 0,
    key: str = "",
    models: Sequence[str] = ("model-x",),
) -> Iterator[str]:
    """A router's HTTP with these answers, which asks for ``key``; yields its address."""
    left = [not_ready]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?model=")
            is_served = not query or unquote(query) in models
            if path == "/ready" and not is_served:
                self.reply(404, {"error": {"message": f"no model {unquote(query)}"}})
            elif path == "/ready" and left[0] > 0:
                left[0] -= 1
                self.reply(503, {"status": "not ready", "missing": ["decode"]})
            elif key and path != "/ready" and not self.shows(key):
                self.reply(401, {"error": {"message": "a key is needed"}})
            else:
                self.reply(200, {"data": [{"id": name} for name in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert body["model"] in models
            assert not key or self.shows(key)
            self.reply(status, answer)

        def shows(self, key: str) -> bool:
            return self.headers["authorization"] == f"Bearer {key}"

        def reply(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("x-tandem-timings", json.dumps(timings))
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(endpoint: str, *more: str, timeout_s: float = 30.0) -> int:
    script = runpy.run_path(SCRIPT)
    script["wait_ready"].__globals__["PAUSE_S"] = 0.01
    status: int = script["main"]([endpoint, f"--timeout={timeout_s}", *more])
    return status


def test_an_answer_of_both_roles_is_proof(capsys: pytest.CaptureFixture[str]) -> None:
    with router(not_ready=2) as endpoint:
        assert run(endpoint) == 0
    output = capsys.readouterr().out
    assert "model-x: 16 tokens through prefill and decode" in output
    assert "waiting" in output


def test_an_answer_that_was_faster_than_word_of_its_transfer_is_proof() -> None:
    timings = {name: time for name, time in TIMINGS.items() if name != "kv_transfer_s"}
    with router(timings=timings) as endpoint:
        assert run(endpoint) == 0


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ({"answer": {**ANSWER, "usage": {"completion_tokens": 1}}}, "1 tokens and not 16"),
        ({"timings": {"prefill_compute_s": 0.1}}, "no decode_admission_s"),
        ({"status": 502, "answer": {"error": {"code": "worker_lost"}}}, "worker_lost"),
    ],
    ids=["prefill alone", "no word of decode", "an error"],
)
def test_anything_else_is_not(
    server: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with router(**server) as endpoint:
        assert run(endpoint) == 1
    assert told in capsys.readouterr().err


def test_a_cluster_that_is_never_ready_ends_the_wait(capsys: pytest.CaptureFixture[str]) -> None:
    with router(not_ready=10**9) as endpoint:
        assert run(endpoint, timeout_s=0.05) == 1
    assert "not ready after 0.05 s" in capsys.readouterr().err


def test_of_several_models_the_named_one_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with router(models=("another", "org/model y")) as endpoint:
        assert run(endpoint, "--model=org/model y") == 0
        assert "org/model y: 16 tokens" in capsys.readouterr().out


def test_another_model_that_is_served_proves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with router(models=("another",)) as endpoint:
        assert run(endpoint, "--model=model-x", timeout_s=0.05) == 1
    assert "no model model-x" in capsys.readouterr().err


def test_a_key_is_shown_where_one_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with router(key="sk-of-tests") as endpoint:
        assert run(endpoint) == 1
        assert "a key is needed" in capsys.readouterr().err
        # Of a file that ends in a newline, as a shell writes it.
        monkeypatch.setenv("TANDEM_API_KEY", "sk-of-tests\n")
        assert run(endpoint) == 0
