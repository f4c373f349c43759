"""``tandem bench ...``: measurements of this machine, as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from bench.engine.command import (
    add_decode_arguments,
    add_prefill_arguments,
    add_rows_arguments,
    run_decode_command,
    run_prefill_command,
    run_rows_command,
)
from bench.kv.command import add_arguments as add_kv_arguments
from bench.kv.command import run as run_kv
from bench.pair.command import add_arguments as add_pair_arguments
from bench.pair.command import run as run_pair
from bench.tuner.command import add_arguments as add_tune_arguments
from bench.tuner.command import run as run_tune
from deploy.commands.common import add_command
from runtime.config.file import load_config

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Declare ``bench`` and what it can measure."""
    parser = add_command(
        commands,
        "bench",
        help="measure this machine",
        description="Measure, and print JSON. None but startup and pair starts a cluster.",
        examples="tandem bench kv --transport loopback\ntandem bench prefill --tp 8",
    )
    subjects = parser.add_subparsers(title="subjects", metavar="SUBJECT", required=True)
    startup = add_command(
        subjects,
        "startup",
        help="seconds from `tandem up` to ready, and memory",
        examples="tandem bench startup\ntandem bench startup cluster.toml",
    )
    startup.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG", help="a TOML file (default: built in)"
    )
    startup.set_defaults(command=run_startup)
    transfer = add_command(
        subjects,
        "kv",
        help="GB/s of KV transfer between two processes",
        description="Two processes of this machine: one pushes the KV of prompts, block by block, "
        "into the memory of the other, as a prefill worker does.",
        examples="tandem bench kv --transport loopback",
    )
    add_kv_arguments(transfer)
    transfer.set_defaults(command=run_kv)
    _add_engine_parsers(subjects)
    pair = add_command(
        subjects,
        "pair",
        help="a prefill and a decode instance, and each alone",
        description="A whole cluster of one prefill and one decode instance with invented weights, "
        "under load; and each of them alone, to see what the pair costs.",
        examples="tandem bench pair --prefill-tp 4 --decode-dp 4 --layers 24",
    )
    add_pair_arguments(pair)
    pair.set_defaults(command=run_pair)
    tune = add_command(
        subjects,
        "tune",
        help="find the fastest tiles of FP8 GEMMs on this GPU",
        examples="tandem bench tune --model deepseek-v3 --tp 8 --ep 8 --budget-s 1800",
    )
    add_tune_arguments(tune)
    tune.set_defaults(command=run_tune)


def _add_engine_parsers(subjects: Subparsers) -> None:
    prefill = add_command(
        subjects,
        "prefill",
        help="tokens per second of prompts on these GPUs",
        description="Prefill steps of a model with invented weights on this host's GPUs, without a "
        "cluster.",
        examples="tandem bench prefill --tp 8\ntandem bench prefill --dp 8 --batch-tokens 4096",
    )
    add_prefill_arguments(prefill)
    prefill.set_defaults(command=run_prefill_command)
    decode = add_command(
        subjects,
        "decode",
        help="tokens per second of decode steps on these GPUs",
        description="Decode steps of a model with invented weights on this host's GPUs, without a "
        "cluster.",
        examples="tandem bench decode --dp 8 --batch 128",
    )
    add_decode_arguments(decode)
    decode.set_defaults(command=run_decode_command)
    rows = add_command(
        subjects,
        "rows",
        help="a table of both, row by row, as lines of JSON",
        description="Row after row of a file, each as `tandem bench prefill` or `tandem bench "
        "decode` would be given it. Neighbours with the same ranks share processes, and the model "
        "where they agree on it.",
        examples="tandem bench rows bench/rows/one-gpu.txt --json table.jsonl\n"
        "tandem bench rows table.txt --add '--seconds 10 --profile off'",
    )
    add_rows_arguments(rows)
    rows.set_defaults(command=run_rows_command)


def run_startup(arguments: argparse.Namespace) -> int:
    """Start a cluster of its own, measure, stop it."""
    from bench.startup import measure_startup

    result = measure_startup(load_config(arguments.config))
    print(json.dumps(dataclasses.asdict(result), indent=1))
    return 0
