"""The ``tandem`` command: reads arguments, runs one command, turns known errors into one line.

Each command lives in a file of ``deploy.commands``. Whatever is heavy (torch, Ray) is imported
inside the command that needs it, so that ``tandem --help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from deploy.commands import (
    apply,
    bench,
    down,
    drain,
    events,
    generate,
    model,
    restart,
    scale,
    status,
    up,
    validate,
)
from deploy.errors import ClusterError, RefusedError, WrongArgumentError
from runtime.errors import ConfigError

Command = Callable[[argparse.Namespace], int]


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="tandem",
        description="Serve DeepSeek-V3-class models with prefill and decode on different workers.",
    )
    parser.add_argument("--version", action="version", version=f"tandem {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    groups = (up, status, events, generate, scale, drain, restart, apply, down)
    for group in (*groups, validate, model, bench):
        group.add_parser(commands)
    return parser


def _version() -> str:
    try:
        return metadata.version("tandem-serve")
    except metadata.PackageNotFoundError:
        return "of a source tree that is not installed"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns 0, 1 for a failure, 2 for a wrong argument or setting, 3 for what the cluster refuses
    now without having changed anything, 130 for Ctrl-C.
    """
    arguments = build_parser().parse_args(argv)
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
