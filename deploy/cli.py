"""The ``tandem`` command: reads arguments, runs one command, turns known errors into one line.

Each command lives in a file of ``deploy.commands``. Whatever is heavy (torch, Ray) is imported
inside the command that needs it, so that ``tandem --help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from deploy.commands import completion
from deploy.commands.advice import commands_of, for_command, for_word
from deploy.commands.by_hand import certificates, router, secret, worker
from deploy.commands.cluster import (
    apply,
    chat,
    down,
    drain,
    events,
    generate,
    logs,
    ranks,
    restart,
    scale,
    status,
    up,
)
from deploy.commands.prepare import bench, doctor, download, experts, keys, model, validate
from deploy.errors import ClusterError, RefusedError, WrongArgumentError
from runtime.errors import ConfigError
from runtime.version import installed_version

Command = Callable[[argparse.Namespace], int]

_EXAMPLES = """\
examples:
  tandem up                              # the bundled model on this CPU
  tandem up ./my-model --port 9000
  tandem generate "def fibonacci(n):"    # in another shell
  tandem status
  tandem down

tandem COMMAND --help tells more, with examples.
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="tandem",
        description="Serve DeepSeek-V3-class models with prefill and decode on different workers.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tandem {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    running = (status, logs, events, ranks, generate, chat, scale, drain, restart, apply, down)
    before = (download, validate, keys, doctor, model, experts, bench)
    by_hand = (worker, router, certificates, secret)
    for group in (up, *running, *before, *by_hand, completion):
        group.add_parser(commands)
    parser.set_defaults(whole=parser)  # for `completion`
    return parser


def _version() -> str:
    return installed_version() or "of a source tree that is not installed"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns 0, 1 for a failure, 2 for a wrong argument or setting, 3 for what the cluster refuses
    now without having changed anything, 130 for Ctrl-C.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    if (status := _answer_no_command(parser, words)) is not None:
        return status
    arguments, rest = parser.parse_known_args(words)
    if rest:
        return _refuse_words(parser, words, rest[0])
    command: Command = arguments.command
    try:
        return command(arguments)
    except (ConfigError, WrongArgumentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (`tandem ... | head`); nothing more can be said.
        sys.stderr.close()
        return 1


def _answer_no_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> int | None:
    """Help where the words end before a command does, advice where there is no such command."""
    while (commands := commands_of(parser)) and words:
        word = words[0]
        if word not in commands:
            if word.startswith("-"):
                return None
            print(
                f"error: there is no `{parser.prog} {word}`. {for_command(parser, word)}",
                file=sys.stderr,
            )
            return 2
        parser, words = commands[word], words[1:]
    if not commands:
        return None
    parser.print_help()
    return 2


def _refuse_words(parser: argparse.ArgumentParser, words: Sequence[str], first: str) -> int:
    """Tell of a word that the command among ``words`` does not take."""
    command = parser
    for word in words:
        below = commands_of(command)
        if word not in below:
            break
        command = below[word]
    command.print_usage(sys.stderr)
    print(f"error: `{command.prog}` takes no {first}. {for_word(command, first)}", file=sys.stderr)
    return 2
