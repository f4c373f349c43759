"""Asks a cluster as any client does: an endpoint, its certificate, and streams of text.

Blocking, on the standard library alone: `tandem generate` and `tandem chat` begin at once.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from deploy.clients.http_client import connect_http
from deploy.errors import ClusterError
from runtime.parsing import parse_json

_TIMEOUT_S = 600.0
_DATA = b"data: "

NewsT = TypeVar("NewsT")


class ChatText(NamedTuple):
    """News of a chat answer."""

    content: str
    reasoning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The HTTP side of a cluster."""

    endpoint: str
    """The OpenAI-compatible base address."""
    context: ssl.SSLContext | None = None
    """For https; None: the authorities that this machine believes."""
    api_key: str = field(default="", repr=False)
    """Empty: none is shown."""

    def served_model(self) -> str:
        """The name of the model.

        Raises:
            ClusterError: no answer, or nothing is served yet.
        """
        with self._call("/models") as response:
            models = _understood(
                response.read(), lambda answer: [str(model["id"]) for model in answer["data"]]
            )
        if not models:
            raise ClusterError(
                "no model is served yet. Fix: wait for its workers (`tandem status`)"
            )
        return models[0]

    def stream_completion(self, body: Mapping[str, object]) -> Iterator[str]:
        """The texts of a streamed ``POST completions``, as they come; "" once it is accepted.

        Raises:
            ClusterError: the server cannot be reached, refuses the request, or fails meanwhile.
        """
        yield from self._news("/completions", body, "", lambda choice: _text(choice["text"]))

    def stream_chat(self, body: Mapping[str, object]) -> Iterator[ChatText]:
        """The texts of a streamed ``POST chat/completions``; as ``stream_completion``."""

        def news(choice: Mapping[str, Any]) -> ChatText:
            delta = choice["delta"]
            reasoning = delta.get("reasoning") or delta.get("reasoning_content")
            return ChatText(_text(delta.get("content") or ""), _text(reasoning or ""))

        yield from self._news("/chat/completions", body, ChatText("", ""), news)

    def _news(
        self,
        path: str,
        body: Mapping[str, object],
        accepted: NewsT,
        read: Callable[[Mapping[str, Any]], NewsT],
    ) -> Iterator[NewsT]:
        """What ``read`` makes of each choice; ``accepted`` first, when the server has done so."""

        def of_chunk(chunk: Mapping[str, Any]) -> list[NewsT]:
            if "error" in chunk:
                raise ClusterError(_error_text(chunk))
            return [read(choice) for choice in chunk["choices"]]

        with self._call(path, json.dumps({**body, "stream": True}).encode()) as response:
            yield accepted
            for data in _events(response):
                if data == b"[DONE]":
                    return
                yield from _understood(data, of_chunk)
        raise ClusterError(f"{self.endpoint} ended the stream before the answer was over")

    @contextmanager
    def _call(self, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        """GET ``path``, or POST ``body`` to it."""
        endpoint, parts = self.endpoint, urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClusterError(
                f"{endpoint!r} is no address; give one like http://127.0.0.1:8000/v1"
            )
        connection = connect_http(endpoint, self.context, timeout_s=_TIMEOUT_S)
        method = "POST" if body else "GET"
        headers = {"Content-Type": "application/json"} if body else {}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        with closing(connection):
            try:
                connection.request(method, parts.path + path, body=body, headers=headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise ClusterError(f"{endpoint} does not answer ({error})") from error
            if response.status != 200:
                raise ClusterError(_refusal(response))
            yield response


def server_at(url: str, ca: str | None, *, api_key: str = "") -> Server:
    """The server at an ``http://`` or ``https://`` address, whose certificate ``ca`` signed.

    An address without a path is of the API below /v1.

    Raises:
        ClusterError: ``ca`` holds no certificates.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ClusterError(f"--ca {ca}: no certificates in PEM ({error})") from error
    endpoint = url.rstrip("/")
    if not urlsplit(endpoint).path:
        endpoint += "/v1"
    return Server(endpoint=endpoint, context=context, api_key=api_key)


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        for line in response:
            if line.startswith(_DATA):
                yield line[len(_DATA) :].strip()
    except (OSError, http.client.HTTPException) as error:
        raise ClusterError(f"the connection broke off ({error})") from error


def _refusal(response: http.client.HTTPResponse) -> str:
    text = response.read().decode(errors="replace")
    try:
        return _error_text(parse_json(text))
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status}: {text[:500]}"


def _understood(data: bytes, read: Callable[[Any], NewsT]) -> NewsT:
    """What ``read`` makes of JSON that another server sent."""
    try:
        return read(parse_json(data))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ClusterError(f"no answer of this API: {data[:80]!r} ({error!r})") from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _error_text(answer: Mapping[str, Any]) -> str:
    return str(answer["error"]["message"])
