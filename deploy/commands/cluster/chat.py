"""``tandem chat``: talk with the model of a running cluster, in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deploy.commands.cluster.generate import (
    add_sampling_arguments,
    add_server_arguments,
    chosen_server,
    sampling_of,
    say,
)
from deploy.commands.common import add_command
from deploy.errors import ClusterError

if TYPE_CHECKING:
    from deploy.clients.openai_client import ChatText, Server
    from deploy.commands.common import Subparsers

_PROMPT = "> "
_COMMANDS = """\
/reset   forget what was said
/exit    leave; so does Ctrl-D
/help    this list
Ctrl-C   cut the answer short"""
_EXAMPLES = """
tandem chat
tandem chat --system "Answer in one sentence." --temperature 0.6
tandem chat --url https://tandem.example.com/v1 --ca ca.pem
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``chat``."""
    parser = add_command(
        commands,
        "chat",
        help="talk with the model of a running cluster",
        description="Each line is a message; answers come as they are written. /reset forgets what "
        "was said, Ctrl-C cuts an answer short, Ctrl-D leaves.",
        examples=_EXAMPLES,
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="a system message before all")
    add_sampling_arguments(parser, max_tokens=512)
    add_server_arguments(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Read messages until the input ends."""
    server = chosen_server(arguments)
    model = arguments.model or server.served_model()
    talk = Talk(server, {"model": model, **sampling_of(arguments)}, arguments.system)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() edits lines with it
        print(f"{model} at {server.endpoint}\n{_COMMANDS}\n")
    for line in _lines(is_terminal):
        if line == "/exit":
            break
        _answer(talk, line)
    return 0


@dataclass(slots=True)
class Talk:
    """What was said so far. One thread."""

    server: Server
    options: dict[str, object]
    """Of each request, but for its messages."""
    system: str = ""
    said: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str, show: Callable[[str], None]) -> None:
        """Say ``text``, and show the answer as it comes; it is remembered, its reasoning is not.

        Raises:
            ClusterError: no answer, or none to the end; without any, nothing was said.
            KeyboardInterrupt: the answer was cut short, and the server told.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        message = {"role": "user", "content": text}
        body = {**self.options, "messages": [*system, *self.said, message]}
        parts: list[str] = []
        # Closed at once: a connection that ends is how the server learns that nobody listens.
        with contextlib.closing(self._stream(body)) as stream:
            try:
                is_reasoning = False
                for part in stream:
                    if part.reasoning:
                        show(part.reasoning)
                        is_reasoning = True
                    elif is_reasoning and part.content:
                        show("\n\n")
                        is_reasoning = False
                    parts.append(part.content)
                    show(part.content)
            finally:
                if any(parts):
                    self.said += [message, {"role": "assistant", "content": "".join(parts)}]

    def _stream(self, body: dict[str, object]) -> Generator[ChatText, None, None]:
        yield from self.server.stream_chat(body)

    def reset(self) -> None:
        """Forget it all."""
        self.said.clear()


def _lines(is_terminal: bool) -> Iterator[str]:
    """The messages and commands of a person, without empty ones, until the input ends."""
    while True:
        try:
            line = input(_PROMPT if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\n(Ctrl-D or /exit leaves)")
            continue
        if line:
            yield line


def _answer(talk: Talk, line: str) -> None:
    if line == "/reset":
        talk.reset()
        print("(forgotten)")
    elif line.startswith("/"):
        print(_COMMANDS)
    else:
        try:
            talk.ask(line, say)
            print()
        except KeyboardInterrupt:
            print(" (cut short)")
        except ClusterError as error:
            # The talk goes on: the next message may be shorter, or the worker back.
            print(f"\nerror: {error}", file=sys.stderr)
