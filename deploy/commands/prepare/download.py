"""``tandem download MODEL``: a model of the Hugging Face hub onto this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.commands.common import add_command
from deploy.errors import WrongArgumentError
from runtime.hub_model import HubModel

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Declare ``download``."""
    parser = add_command(
        commands,
        "download",
        help="bring a model from the Hugging Face hub",
        description="Downloads what serving needs of a model, and verifies it; prints the folder. "
        "What is whole already is not downloaded again. HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and "
        "HF_TOKEN of the environment count. `tandem up MODEL` does the same by itself.",
        examples="""
tandem download deepseek-ai/DeepSeek-V3                       # into the cache, below HF_HOME
tandem download deepseek-ai/DeepSeek-V3@v1 --to /models/v3    # a branch, tag or commit; a folder
""",
    )
    parser.add_argument("model", metavar="ORG/NAME[@REVISION]", help="the model (default: of main)")
    parser.add_argument("--to", type=Path, metavar="DIR", help="the folder, instead of the cache")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Download it; where it is."""
    from deploy.checkpoint.download import download

    model = HubModel.parse(arguments.model)
    if model is None:
        raise WrongArgumentError(
            f"{arguments.model!r} names no model of the hub. Fix: ORG/NAME or ORG/NAME@REVISION"
        )
    print(download(model, to=arguments.to and arguments.to.expanduser().resolve()))
    return 0
