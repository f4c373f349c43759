"""``tandem validate CONFIG``: everything that can be known to fail, before anything starts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.config_file import load_config

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Declare ``validate``."""
    parser = commands.add_parser("validate", help="check a configuration file")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what would be started; a ConfigError says what is wrong."""
    from deploy.checks import check_config, count_devices, resolve_config
    from deploy.plan import num_devices_needed, plan_instances

    config = resolve_config(load_config(arguments.config))
    check_config(config, num_devices=count_devices())
    plans = plan_instances(config)
    for plan in plans:
        ranks = "1 rank" if plan.num_ranks == 1 else f"{plan.num_ranks} ranks"
        print(f"{plan.name:<12} {ranks} on {plan.device}")
    print(f"model        {config.model.name} ({config.model.path})")
    print(f"devices      {num_devices_needed(plans)} of {count_devices()} CUDA devices")
    print(f"{arguments.config} is valid")
    return 0
