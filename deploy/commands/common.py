"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.errors import ClusterError
from deploy.state import ClusterState, RunDir, find_run_dir
from runtime.config import ClusterConfig
from runtime.config.file import load_config, with_settings
from runtime.errors import ConfigError
from runtime.hub_model import HubModel
from runtime.net.credentials import Credentials
from runtime.net.roles import Role

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(
    commands: Subparsers, name: str, *, help: str, examples: str, description: str = ""
) -> argparse.ArgumentParser:
    """Declare a command; ``examples`` are whole command lines, explanations after ``#``."""
    lines = [f"  {line.strip()}" for line in examples.strip().splitlines()]
    return commands.add_parser(
        name,
        help=help,
        description=description or f"{help[0].upper()}{help[1:]}.",
        epilog="\n".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """``CONFIG``, ``--set`` and short forms of the fields that are set most."""
    parser.add_argument(
        "config",
        nargs="?",
        type=Path,
        action=_ConfigOrModel,
        metavar="CONFIG|MODEL",
        help="a TOML file (default: built in); or a model, as --model takes it",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder of a checkpoint, or ORG/NAME[@REVISION] of the Hugging Face hub, instead of "
        "model.path (default: the bundled model)",
    )
    parser.add_argument("--port", metavar="N", help="of HTTP, instead of router.port; 0: any")
    parser.add_argument(
        "--host", metavar="ADDRESS", help="on which HTTP listens, instead of router.host"
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="any field of the configuration, over what CONFIG says; as often as you like",
    )


class _ConfigOrModel(argparse.Action):
    """A folder is a model, and so is a name of the hub; all else is a file."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if not isinstance(values, Path):
            return
        if values.is_dir() or HubModel.meant_by(str(values)):
            namespace.settings = [*namespace.settings, f"model.path={values}"]
        else:
            namespace.config = values


_SHORT_FORMS = {"model": "model.path", "host": "router.host", "port": "router.port"}


def settings_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """All fields that the command line sets, as ``--set`` takes them."""
    short = (
        f"{field}={value}"
        for name, field in _SHORT_FORMS.items()
        if (value := getattr(arguments, name)) is not None
    )
    return (*short, *arguments.settings)


def chosen_config(arguments: argparse.Namespace, *, base: Path | None = None) -> ClusterConfig:
    """The configuration that the file and the command line describe.

    Relative paths of the command line start from ``base``, the working directory without one.

    Raises:
        ConfigError: a field that cannot be.
    """
    config = load_config(arguments.config)
    if arguments.model and any(one.startswith("model.path=") for one in arguments.settings):
        raise ConfigError("--model", arguments.model, "another model is named", "one of them")
    return with_settings(config, settings_of(arguments), base=base or Path.cwd())


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """``--name`` and ``--config``: which running cluster is meant."""
    parser.add_argument("--name", default="", help="cluster.name (default: the one that runs)")
    parser.add_argument(
        "--config", type=Path, help="the TOML file that the cluster was started with"
    )


def chosen_run_dir(arguments: argparse.Namespace) -> RunDir:
    """The run directory that ``--name`` and ``--config`` choose.

    Raises:
        ClusterError: none runs, or several do.
        ConfigError: the file is wrong.
    """
    name, run_dir = arguments.name, ""
    if arguments.config is not None:
        cluster = load_config(arguments.config).cluster
        name, run_dir = name or cluster.name, cluster.run_dir
    return find_run_dir(name, run_dir)


def running_state(run_dir: RunDir) -> ClusterState:
    """The state of a cluster whose controller lives.

    Raises:
        ClusterError: it does not run.
    """
    state = run_dir.read_state()
    if state is None or not run_dir.is_owned():
        reason = f"; it failed: {state.error}" if state is not None and state.error else ""
        raise ClusterError(
            f"cluster {run_dir.path.name!r} is not running{reason}; start it with `tandem up`"
        )
    return state


def run_credentials(run_dir: RunDir) -> Credentials:
    """What proves to the cluster of ``run_dir``, which runs, that we are its user's.

    Raises:
        ConfigError: its configuration or certificates cannot be read.
    """
    tls = load_config(run_dir.config_path).tls.files
    return Credentials(secret=run_dir.read_secret(), tls=tls, role=Role.CONTROLLER)
