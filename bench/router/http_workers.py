"""Workers behind OpenAI's HTTP API that compute nothing: what other routers are measured against.

Each stream gets one event a step, with the text of one token; the first comes at once. A router
that splits prefill from decode sends each request to both, and takes decode's stream once prefill
has answered, which ends with its first token. Run it: ``python -m bench.router.http_workers
--prefill PORT --decode PORT --step-ms 20 --model NAME``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from functools import partial
from typing import Any

HOST = "127.0.0.1"
WORDS = (" return", " fibonacci", "(n", " -", " 1", ")", "\n", "    if", " not", " the")
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: "
_STREAM_HEAD = _HEAD + b"text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Stream:
    """One answer under way."""

    def __init__(
        self, transport: asyncio.Transport, number: int, body: dict[str, Any], max_tokens: int
    ) -> None:
        self._transport = transport
        self._num_left = max_tokens
        self._is_streamed = bool(body.get("stream"))
        self._text = ""
        self._words = itertools.cycle(WORDS)
        self._head = {
            "id": f"cmpl-{number:032x}",
            "object": "text_completion",
            "created": 1700000000,
            "model": body["model"],
        }

    def begin(self) -> None:
        """The headers, if they do not wait for the whole."""
        if self._is_streamed:
            self._transport.write(_STREAM_HEAD)

    def step(self) -> bool:
        """Say one token; whether it was the last."""
        self._num_left -= 1
        word, is_last = next(self._words), self._num_left <= 0
        if not self._is_streamed:
            self._text += word
            if is_last:
                self._transport.write(_json(self._payload(self._text, "length")))
            return is_last
        data = _event(self._payload(word, None))
        if is_last:
            data += _event(self._payload("", "length")) + b"data: [DONE]\n\n"
        data = b"%x\r\n%b\r\n" % (len(data), data)
        self._transport.write(data + b"0\r\n\r\n" if is_last else data)
        return is_last or self._transport.is_closing()

    def _payload(self, text: str, finish_reason: str | None) -> dict[str, object]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}


def _event(payload: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def _json(payload: object) -> bytes:
    content = json.dumps(payload).encode()
    return _HEAD + b"application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


class Workers:
    """All streams of both roles."""

    def __init__(self, model: str, step_s: float) -> None:
        self._step_s = step_s
        self._streams: list[Stream] = []
        self._numbers = itertools.count()
        self._facts: dict[str, object] = {
            "model_path": model,
            "tokenizer_path": model,
            "served_model_name": model,
            "is_generation": True,
            "max_running_requests": 4096,
        }
        self._models = {"object": "list", "data": [{"id": model, "object": "model"}]}

    def answer(self, connection: Connection, path: str, content: bytes) -> None:
        """Answer one request."""
        transport = connection.transport
        assert transport is not None
        if path.endswith("/completions"):
            body = json.loads(content)
            max_tokens = 1 if connection.is_prefill else int(body["max_tokens"])
            stream = Stream(transport, next(self._numbers), body, max_tokens)
            stream.begin()
            if not stream.step():
                self._streams.append(stream)
        else:
            transport.write(_json(self._models if path == "/v1/models" else self._facts))

    async def step_forever(self) -> None:
        """One token of every stream, each step."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._step_s, loop.time())
            self._streams = [stream for stream in self._streams if not stream.step()]
            await asyncio.sleep(max(0.0, due - loop.time()))


class Connection(asyncio.Protocol):
    """Reads requests; good for the routers that are measured, not for strangers."""

    def __init__(self, workers: Workers, *, is_prefill: bool) -> None:
        self._workers = workers
        self._data = b""
        self.is_prefill = is_prefill
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepted."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        self._data += data
        while b"\r\n\r\n" in self._data:
            head, _, rest = self._data.partition(b"\r\n\r\n")
            lines = head.split(b"\r\n")
            headers = dict(line.lower().split(b": ", 1) for line in lines[1:])
            length = int(headers.get(b"content-length", b"0"))
            if len(rest) < length:
                return
            self._data = rest[length:]
            self._workers.answer(self, lines[0].split()[1].decode(), rest[:length])


async def _serve(options: argparse.Namespace) -> None:
    workers = Workers(options.model, options.step_ms / 1000)
    loop = asyncio.get_running_loop()
    for port, is_prefill in ((options.prefill, True), (options.decode, False)):
        await loop.create_server(partial(Connection, workers, is_prefill=is_prefill), HOST, port)
    await workers.step_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", type=int, required=True, metavar="PORT")
    parser.add_argument("--decode", type=int, required=True, metavar="PORT")
    parser.add_argument("--model", required=True)
    parser.add_argument("--step-ms", type=float, default=20.0)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
