"""``tandem validate CONFIG``: everything that can be known to fail, before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from deploy.checkpoint.model_folder import with_model
from deploy.checks.early import check_named_files
from deploy.commands.common import add_command, add_config_arguments, chosen_config
from deploy.views.display import posture_table

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers
    from deploy.plan import InstancePlan
    from engine.model.spec import CommonConfig
    from runtime.config import ClusterConfig, DecodeSection, PrefillSection


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
tandem validate cluster.toml --devices 24 --model-shape deepseek-r1   # before its weights are here
""",
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="check for a cluster of N CUDA devices instead of this machine's",
    )
    parser.add_argument(
        "--model-shape",
        metavar="NAME",
        help="check for a published model instead of a folder: deepseek-v3, deepseek-r1, kimi-k2, "
        "...; decode.device_memory_gib says what a GPU has",
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what would be started; a ConfigError says what is wrong."""
    named = chosen_config(arguments)  # looked at before what is heavy is imported
    check_named_files(named)
    if arguments.model_shape is None:
        with_model(named)
    from deploy.checkpoint.model_shapes import read_model_shape, with_shape
    from deploy.checkpoint.report import checkpoint_lines
    from deploy.checks.cluster import (
        check_config,
        checked_keys,
        count_devices_for,
        read_model,
        remarks_of,
        remarks_of_tiers,
        resolve_config,
    )
    from deploy.checks.decode_memory import describe_decode_memory, plan_decode_memory
    from deploy.checks.posture import posture_of
    from deploy.checks.prefill_memory import describe_prefill_memory, plan_prefill_memory
    from deploy.plan import num_devices_needed, plan_instances

    chosen, shape = chosen_config(arguments), None
    if arguments.model_shape is not None:
        shape = read_model_shape(arguments.model_shape)
        chosen = with_shape(chosen, shape)
        if shape.refusal is not None:
            print(f"not served   {shape.refusal}")
    published = shape.model if shape else None
    config = resolve_config(chosen, shape=published)
    num_devices = count_devices_for(config) if arguments.devices is None else arguments.devices
    check_config(config, num_devices=num_devices, shape=published)
    keys = checked_keys(config)
    plans = plan_instances(config)
    _print_ranks(plans)
    for role, section in (("prefill", config.prefill), ("decode", config.decode)):
        print(f"{role} step".ljust(12), _sizes_of(section))
    source = f"as {shape.name} is published" if shape else config.model.path
    print(f"model        {config.model.name} ({source})")
    if shape is None:
        print("\n".join(checkpoint_lines(config)))
    print(f"computes in  {config.compute_dtype}")
    print(f"devices      {num_devices_needed(plans)} of {num_devices} CUDA devices")
    if keys is not None:
        print(f"API keys     {len(keys.current())}")
    model = published or read_model(config)
    print(f"drafts       {_drafts_of(chosen, config, model)}")
    for remark in (*model.remarks, *remarks_of(config), *remarks_of_tiers(config, keys)):
        print(f"note         {remark}")
    if (held := plan_prefill_memory(config, model)) is not None:
        print(describe_prefill_memory(held))
    budget = plan_decode_memory(config, model)
    if budget is not None:
        print("\n".join(describe_decode_memory(budget)))
    if shape is not None and shape.refusal is not None:
        raise shape.refusal
    print(f"{arguments.config or 'the configuration'} is valid")
    print()
    Console().print(posture_table(posture_of(config, has_keys=keys is not None)), highlight=False)
    return 0


def _print_ranks(plans: Sequence[InstancePlan]) -> None:
    for plan in plans:
        ranks = "1 rank" if plan.num_ranks == 1 else f"{plan.num_ranks} ranks"
        print(f"{plan.name:<12} {ranks} on {plan.device}")


def _sizes_of(section: PrefillSection | DecodeSection) -> str:
    """What a step of a rank takes, and its pool."""
    sizes = section.sizes
    tokens = sizes.max_num_batched_tokens
    blocks = f"{sizes.num_blocks} KV blocks" if sizes.num_blocks else "as many KV blocks as fit"
    return f"{sizes.max_num_seqs} requests{f' and {tokens} tokens' if tokens else ''}, {blocks}"


def _drafts_of(chosen: ClusterConfig, config: ClusterConfig, model: CommonConfig) -> str:
    """How many a step verifies, and why none where that was left open."""
    from deploy.checks.drafts import decide_drafts

    decode = config.decode
    if decode.num_speculative_tokens == "auto":
        return "as many as pay"
    asked = dataclasses.replace(decode, num_speculative_tokens=chosen.decode.num_speculative_tokens)
    _, why = decide_drafts(dataclasses.replace(config, decode=asked), model)
    return f"{decode.num_speculative_tokens or 'none'}{why and f': {why}'}"
