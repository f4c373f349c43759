"""``tandem generate PROMPT``: stream a completion of a running cluster to the terminal."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.clients.openai_client import Server, server_at
from deploy.commands.common import (
    add_cluster_arguments,
    add_command,
    chosen_run_dir,
    run_credentials,
    running_state,
)

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

API_KEY_VARIABLE = "TANDEM_API_KEY"
_EXAMPLES = """
tandem generate "def fibonacci(n):" --max-tokens 64
cat prompt.txt | tandem generate - --temperature 0.8 --seed 1
tandem generate "Once" --url https://tandem.example.com/v1 --ca ca.pem
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``generate``."""
    parser = add_command(
        commands,
        "generate",
        help="complete a text with a running cluster",
        description="Print PROMPT, and what the model goes on with, as it comes. The environment's "
        f"{API_KEY_VARIABLE} is the API key, where the server asks for one.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        help="the text to go on with; - reads it from stdin, without the newline at its end",
    )
    add_sampling_arguments(parser, max_tokens=128)
    add_server_arguments(parser)
    parser.set_defaults(command=run)


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """How the model writes."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
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
    parser.add_argument(
        "--seed", type=int, metavar="N", help="the same seed gives the same text again"
    )


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Who is asked: a cluster of this machine, or any other by its address."""
    parser.add_argument(
        "--url", default="", help="http://host:port/v1 or https://... of another cluster"
    )
    parser.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="with --url: the authority of its certificate (default: those of this machine)",
    )
    parser.add_argument("--model", default="", help="the model's name (default: what is served)")
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print prompt and completion as it comes."""
    prompt = arguments.prompt
    if prompt == "-":
        # The newline is the shell's: a model that sees it may take the text for finished.
        prompt = sys.stdin.read().removesuffix("\n")
    server = chosen_server(arguments)
    body = {
        "model": arguments.model or server.served_model(),
        "prompt": prompt,
        **sampling_of(arguments),
    }
    written, accepted = 0, False
    try:
        for text in server.stream_completion(body):
            if not accepted:
                accepted = True
                say(prompt)
            written += len(text)
            say(text)
    finally:
        if accepted:
            say("\n")
    if not written:
        print("the model ended without a text", file=sys.stderr)
    return 0


def sampling_of(arguments: argparse.Namespace) -> dict[str, object]:
    """What ``add_sampling_arguments`` read, as a request has it."""
    sampling = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    return sampling if arguments.seed is None else {**sampling, "seed": arguments.seed}


def chosen_server(arguments: argparse.Namespace) -> Server:
    """The server that ``add_server_arguments`` chose.

    Raises:
        ClusterError: none runs.
    """
    # Never on a command line, which everybody on the machine can read.
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    if arguments.url:
        return server_at(arguments.url, arguments.ca and str(arguments.ca), api_key=key)
    run_dir = chosen_run_dir(arguments)
    endpoint = running_state(run_dir).endpoint
    context = run_credentials(run_dir).client_ssl_context()
    return Server(endpoint=endpoint, context=context, api_key=key)


def say(text: str) -> None:
    """Print at once, without a newline."""
    sys.stdout.write(text)
    sys.stdout.flush()
