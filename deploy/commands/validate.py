"""``tandem validate CONFIG``: everything that can be known to fail, before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from rich.console import Console

from deploy.commands.common import add_command, add_config_arguments, chosen_config
from deploy.display import posture_table

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers
    from engine.model.spec import CommonConfig
    from runtime.config import ClusterConfig


def add_parser(commands: Subparsers) -> None:
    """Declare ``validate``."""
    parser = add_command(
        commands,
        "validate",
        help="check a configuration, and start nothing",
        description="Every check that needs nothing started: fields, checkpoint, devices, memory.",
        examples="""
tandem validate cluster.toml
tandem validate cluster.toml --devices 16 --set decode.dp=8    # for another host
""",
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="check for a cluster of N CUDA devices instead of this machine's",
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what would be started; a ConfigError says what is wrong."""
    from deploy.checkpoint_report import checkpoint_lines
    from deploy.checks import (
        check_config,
        checked_keys,
        count_devices_for,
        read_model,
        remarks_of,
        remarks_of_tiers,
        resolve_config,
    )
    from deploy.decode_memory import describe_decode_memory, plan_decode_memory
    from deploy.plan import num_devices_needed, plan_instances
    from deploy.posture import posture_of

    chosen = chosen_config(arguments)
    config = resolve_config(chosen)
    num_devices = count_devices_for(config) if arguments.devices is None else arguments.devices
    check_config(config, num_devices=num_devices)
    keys = checked_keys(config)
    plans = plan_instances(config)
    for plan in plans:
        ranks = "1 rank" if plan.num_ranks == 1 else f"{plan.num_ranks} ranks"
        print(f"{plan.name:<12} {ranks} on {plan.device}")
    print(f"model        {config.model.name} ({config.model.path})")
    print("\n".join(checkpoint_lines(config)))
    print(f"computes in  {config.compute_dtype}")
    print(f"devices      {num_devices_needed(plans)} of {num_devices} CUDA devices")
    if keys is not None:
        print(f"API keys     {len(keys.current())}")
    model = read_model(config)
    print(f"drafts       {_drafts_of(chosen, config, model)}")
    for remark in (*model.remarks, *remarks_of(config), *remarks_of_tiers(config, keys)):
        print(f"note         {remark}")
    budget = plan_decode_memory(config, model)
    if budget is not None:
        print("\n".join(describe_decode_memory(budget)))
    print(f"{arguments.config or 'the configuration'} is valid")
    print()
    Console().print(posture_table(posture_of(config, has_keys=keys is not None)), highlight=False)
    return 0


def _drafts_of(chosen: ClusterConfig, config: ClusterConfig, model: CommonConfig) -> str:
    """How many a step verifies, and why none where that was left open."""
    from deploy.drafts import decide_drafts

    decode = config.decode
    if decode.num_speculative_tokens == "auto":
        return "as many as pay"
    asked = dataclasses.replace(decode, num_speculative_tokens=chosen.decode.num_speculative_tokens)
    _, why = decide_drafts(dataclasses.replace(config, decode=asked), model)
    return f"{decode.num_speculative_tokens or 'none'}{why and f': {why}'}"
