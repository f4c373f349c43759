"""``tandem bench ...``: measurements of this machine, as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.engine_bench.command import (
    add_decode_arguments,
    add_prefill_arguments,
    run_decode_command,
    run_prefill_command,
)
from deploy.kv_bench.command import add_arguments as add_kv_arguments
from deploy.kv_bench.command import run as run_kv
from deploy.pair_bench.command import add_arguments as add_pair_arguments
from deploy.pair_bench.command import run as run_pair
from deploy.tune.command import add_arguments as add_tune_arguments
from deploy.tune.command import run as run_tune
from runtime.config_file import load_config

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Declare ``bench`` and what it can measure."""
    parser = commands.add_parser("bench", help="measure")
    subjects = parser.add_subparsers(title="subjects", metavar="SUBJECT", required=True)
    startup = subjects.add_parser("startup", help="seconds from `tandem up` to ready, and memory")
    startup.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG", help="a TOML file (default: built in)"
    )
    startup.set_defaults(command=run_startup)
    transfer = subjects.add_parser("kv", help="GB/s of KV transfer between two processes")
    add_kv_arguments(transfer)
    transfer.set_defaults(command=run_kv)
    prefill = subjects.add_parser("prefill", help="tokens per second of prompts on these GPUs")
    add_prefill_arguments(prefill)
    prefill.set_defaults(command=run_prefill_command)
    decode = subjects.add_parser("decode", help="tokens per second of decode steps on these GPUs")
    add_decode_arguments(decode)
    decode.set_defaults(command=run_decode_command)
    pair = subjects.add_parser("pair", help="a prefill and a decode instance, and each alone")
    add_pair_arguments(pair)
    pair.set_defaults(command=run_pair)
    tune = subjects.add_parser("tune", help="find the fastest tiles of FP8 products on this GPU")
    add_tune_arguments(tune)
    tune.set_defaults(command=run_tune)


def run_startup(arguments: argparse.Namespace) -> int:
    """Start a cluster of its own, measure, stop it."""
    from deploy.startup_bench import measure_startup

    result = measure_startup(load_config(arguments.config))
    print(json.dumps(dataclasses.asdict(result), indent=1))
    return 0
