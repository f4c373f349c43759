"""``tandem completion SHELL``: a script that completes ``tandem`` in a shell."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from deploy.commands.common import add_command

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_EXAMPLES = """
eval "$(tandem completion bash)"    # in ~/.bashrc
tandem completion zsh > ~/.zfunc/_tandem    # with ~/.zfunc in fpath
tandem completion fish > ~/.config/fish/completions/tandem.fish
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``completion``."""
    parser = add_command(
        commands,
        "completion",
        help="print a shell's completion of this command",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish"
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    print(shtab.complete(arguments.whole, shell=arguments.shell))
    return 0
