"""``tandem generate PROMPT``: stream a completion of a running cluster to the terminal."""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from deploy.commands.common import (
    add_cluster_arguments,
    chosen_run_dir,
    run_credentials,
    running_state,
)
from deploy.errors import ClusterError
from deploy.http_client import connect_http

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_TIMEOUT_S = 600.0
_DATA = b"data: "


def add_parser(commands: Subparsers) -> None:
    """Declare ``generate``."""
    parser = commands.add_parser("generate", help="complete a text with a running cluster")
    parser.add_argument(
        "prompt", metavar="PROMPT", help="the text to go on with; - reads it from stdin"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=128,
        metavar="N",
        help="most tokens to write (default: %(default)d)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 to 2; 0 takes the likeliest token always (default: %(default)g)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    parser.add_argument("--url", default="", help="http(s)://host:port/v1 of another cluster")
    parser.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="with --url: the authority of its certificate (default: those of this machine)",
    )
    parser.add_argument("--model", default="", help="the model's name (default: what is served)")
    add_cluster_arguments(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print prompt and completion as it comes."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    endpoint, context = _server_of(arguments)
    body: dict[str, object] = {
        "model": arguments.model or _served_model(endpoint, context),
        "prompt": prompt,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "stream": True,
    }
    if arguments.seed is not None:
        body["seed"] = arguments.seed
    _say(prompt)
    try:
        for text in stream_completion(endpoint, body, context):
            _say(text)
    finally:
        _say("\n")
    return 0


def _server_of(arguments: argparse.Namespace) -> tuple[str, ssl.SSLContext | None]:
    if not arguments.url:
        run_dir = chosen_run_dir(arguments)
        endpoint = running_state(run_dir).endpoint
        return endpoint, run_credentials(run_dir).client_ssl_context()
    try:
        context = ssl.create_default_context(cafile=arguments.ca)
    except OSError as error:
        raise ClusterError(f"--ca {arguments.ca}: no certificates in PEM ({error})") from error
    return arguments.url.rstrip("/"), context


def stream_completion(
    endpoint: str, body: dict[str, object], context: ssl.SSLContext | None = None
) -> Iterator[str]:
    """The texts of a streamed ``POST {endpoint}/completions``, as they come.

    Raises:
        ClusterError: the server cannot be reached, refuses the request, or fails meanwhile.
    """
    with _call(endpoint, context, "/completions", json.dumps(body).encode()) as response:
        for data in _events(response):
            if data == b"[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise ClusterError(_error_text(chunk))
            for choice in chunk["choices"]:
                yield choice["text"]
    raise ClusterError(f"{endpoint} ended the stream before the completion was over")


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        for line in response:
            if line.startswith(_DATA):
                yield line[len(_DATA) :].strip()
    except (OSError, http.client.HTTPException) as error:
        raise ClusterError(f"the connection broke off ({error})") from error


def _served_model(endpoint: str, context: ssl.SSLContext | None) -> str:
    with _call(endpoint, context, "/models") as response:
        models = json.load(response)["data"]
    if not models:
        raise ClusterError("no model is served yet. Fix: wait for its workers (`tandem status`)")
    return str(models[0]["id"])


@contextmanager
def _call(
    endpoint: str, context: ssl.SSLContext | None, path: str, body: bytes | None = None
) -> Iterator[http.client.HTTPResponse]:
    """GET ``path``, or POST ``body`` to it."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ClusterError(f"{endpoint!r} is no address; give one like http://127.0.0.1:8000/v1")
    connection = connect_http(endpoint, context, timeout_s=_TIMEOUT_S)
    method = "POST" if body else "GET"
    headers = {"Content-Type": "application/json"} if body else {}
    with closing(connection):
        try:
            connection.request(method, parts.path + path, body=body, headers=headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ClusterError(f"{endpoint} does not answer ({error})") from error
        if response.status != 200:
            raise ClusterError(_refusal(response))
        yield response


def _refusal(response: http.client.HTTPResponse) -> str:
    text = response.read().decode(errors="replace")
    try:
        return _error_text(json.loads(text))
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status}: {text[:500]}"


def _error_text(answer: dict[str, Any]) -> str:
    return str(answer["error"]["message"])


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
