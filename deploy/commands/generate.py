"""``tandem generate PROMPT``: stream a completion of a running cluster to the terminal."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from deploy.commands.common import add_cluster_arguments, chosen_run_dir, running_state
from deploy.errors import ClusterError

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
    parser.add_argument("--url", default="", help="http://host:port/v1 of another cluster")
    parser.add_argument("--model", default="", help="the model's name (default: what is served)")
    add_cluster_arguments(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print prompt and completion as it comes."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    endpoint = arguments.url.rstrip("/") or running_state(chosen_run_dir(arguments)).endpoint
    body: dict[str, object] = {
        "model": arguments.model or _served_model(endpoint),
        "prompt": prompt,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "stream": True,
    }
    if arguments.seed is not None:
        body["seed"] = arguments.seed
    _say(prompt)
    try:
        for text in stream_completion(endpoint, body):
            _say(text)
    finally:
        _say("\n")
    return 0


def stream_completion(endpoint: str, body: dict[str, object]) -> Iterator[str]:
    """The texts of a streamed ``POST {endpoint}/completions``, as they come.

    Raises:
        ClusterError: the server cannot be reached, refuses the request, or fails meanwhile.
    """
    with _call(endpoint, "POST", "/completions", json.dumps(body).encode()) as response:
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


def _served_model(endpoint: str) -> str:
    with _call(endpoint, "GET", "/models") as response:
        models = json.load(response)["data"]
    if not models:
        raise ClusterError("no model is served yet. Fix: wait for its workers (`tandem status`)")
    return str(models[0]["id"])


@contextmanager
def _call(
    endpoint: str, method: str, path: str, body: bytes | None = None
) -> Iterator[http.client.HTTPResponse]:
    parts = urlsplit(endpoint)
    if parts.scheme != "http" or not parts.hostname:
        raise ClusterError(f"{endpoint!r} is no address; give one like http://127.0.0.1:8000/v1")
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
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
