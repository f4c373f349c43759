"""The arguments of ``tandem bench kv`` and of ``tandem bench kv``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from typing import TYPE_CHECKING

from kv_transfer.sender_commands import LaneOptions
from kv_transfer.transports import TRANSPORT_NAMES, TransportOptions

if TYPE_CHECKING:
    from bench.kv.sides import BenchPlan

_MIB = 1 << 20
_DEVICES: dict[str, tuple[int | None, int | None]] = {"cpu": (None, None), "cuda": (0, 1)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument(
        "--transport",
        nargs="+",
        choices=TRANSPORT_NAMES,
        help="what moves the KV, one or several (default: all on the CPU, nixl on GPUs)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="whose memory holds the KV"
    )
    parser.add_argument(
        "--prompts", type=_positive, default=20, help="prompts whose KV is sent one after the other"
    )
    parser.add_argument(
        "--in-flight",
        type=_positive,
        default=8,
        help="prompts under way at once, while sustained",
    )
    parser.add_argument(
        "--sustained",
        type=_positive,
        default=24,
        help="prompts of a part that keeps the link full",
    )
    parser.add_argument(
        "--rails", type=_positive, nargs="+", default=[1], help="NIXL agents that share the bytes"
    )
    parser.add_argument(
        "--post-mib",
        type=_positive,
        nargs="+",
        default=[64],
        help="MiB that are posted at once",
    )
    parser.add_argument(
        "--flight-mib", type=_positive, default=1024, help="MiB that may be posted and not done"
    )
    parser.add_argument(
        "--compute-s",
        type=float,
        default=0.5,
        help="seconds over which the KV of a prompt comes, as layers are computed",
    )
    parser.add_argument("--protocol", default="tcp", help="of Mooncake: tcp or rdma")
    parser.add_argument("--devices", default="", help="network cards of Mooncake, a comma list")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Measure every combination; a table on stderr, JSON on stdout."""
    # Imported late: every `tandem` command reads this file, few need numpy.
    from bench.kv.measure import measure_transfer
    from bench.kv.memory import measure_plain_copy

    is_cuda = arguments.device == "cuda"
    bound = statistics.median(measure_plain_copy(_DEVICES[arguments.device], repeat=7)[2:]) / 1e9
    results = []
    for transport in arguments.transport or (["nixl"] if is_cuda else TRANSPORT_NAMES):
        for rails in arguments.rails if transport == "nixl" else [1]:
            for post_mib in arguments.post_mib:
                plan = _plan(arguments, transport, rails, post_mib)
                result = measure_transfer(plan, bound)
                results.append(result)
                print(
                    f"{transport} rails={rails} post={post_mib}MiB: median {result.value:.1f}, "
                    f"best {result.best:.1f}, sustained {result.sustained:.1f}, "
                    f"wire {result.wire_median:.1f}/{result.wire_best:.1f}, "
                    f"copy {result.bound:.1f} GB/s; stall {result.longest_call_s * 1e3:.3f} ms, "
                    f"exposed {result.exposed_share:.2%}",
                    file=sys.stderr,
                    flush=True,
                )
    print(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    return 0


def _plan(arguments: argparse.Namespace, transport: str, rails: int, post_mib: int) -> BenchPlan:
    from bench.kv.sides import BenchPlan

    is_cuda = arguments.device == "cuda"
    return BenchPlan(
        transport=transport,
        devices=_DEVICES[arguments.device],
        options=TransportOptions(
            nixl_rails=rails,
            mooncake_protocol=arguments.protocol,
            mooncake_devices=arguments.devices,
        ),
        lane=LaneOptions(
            max_bytes_in_flight=arguments.flight_mib * _MIB, max_post_bytes=post_mib * _MIB
        ),
        num_prompts=arguments.prompts,
        in_flight=arguments.in_flight,
        num_sets=max(arguments.in_flight, arguments.prompts if is_cuda else 0),
        num_sustained=arguments.sustained,
        compute_s=arguments.compute_s,
    )
