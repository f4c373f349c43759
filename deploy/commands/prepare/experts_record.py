"""``tandem experts record`` and ``export``, and what ``show`` sees of a running cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.commands.common import (
    add_cluster_arguments,
    add_command,
    chosen_run_dir,
    run_credentials,
    running_state,
)
from deploy.plan import Role
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers
    from experts.trace import ExpertTrace
    from router.pool.expert_recording import Recorded, Wanted

SECONDS = 60.0
"""Of a recording, at most, if nobody says otherwise."""
LIVE_SECONDS = 10.0
"""Of a look at a running cluster."""
LIVE_PASSES = 64
_MEMBERS_TIMEOUT_S = 5.0


def add_record(verbs: Subparsers) -> None:
    """Declare ``experts record``."""
    record = add_command(
        verbs,
        "record",
        help="record what the experts of running workers get",
        description="Follow all ranks of a role while they serve, add their counts up and write a "
        "trace: tokens of each logical expert, layer by layer, without padding. Ends after so many "
        "passes or seconds, or with Ctrl-C, and keeps what there is by then. Nothing stays "
        "switched on in the workers, and several may record at once.",
        examples="""
tandem experts record --role decode --passes 1000 --per-pass --out decode.npz
tandem experts record --role prefill --seconds 300 --out prefill.npz
tandem experts record --role decode --worker decode-1 --passes 200 --out one.npz
""",
    )
    _add_role(record, default="decode")
    record.add_argument(
        "--passes", type=_count, metavar="N", help="of each instance (default: all of the time)"
    )
    record.add_argument(
        "--seconds",
        type=_seconds,
        default=SECONDS,
        metavar="S",
        help="at most (default: %(default)g)",
    )
    record.add_argument(
        "--per-pass",
        action="store_true",
        help="a row for each pass, which balancedness is of, instead of sums of up to 32",
    )
    record.add_argument("--out", type=Path, required=True, metavar="FILE", help="the trace, .npz")
    add_cluster_arguments(record)
    record.set_defaults(command=run_record)


def add_export(verbs: Subparsers) -> None:
    """Declare ``experts export``."""
    export = add_command(
        verbs,
        "export",
        help="write a trace's sums for other programs",
        description="Sum a trace over its passes and write it as JSON: `logical_count`, a list of "
        "layers with experts of lists of experts, is what DeepSeek's EPLB takes as its weight. "
        "Workers start from the trace itself: prefill.expert_load, decode.expert_load.",
        examples="tandem experts export decode.npz --out decode.json",
    )
    export.add_argument(
        "trace", type=Path, metavar="TRACE", help="a file that tandem experts record wrote"
    )
    export.add_argument(
        "--out", type=Path, metavar="FILE", help="where it goes (default: standard output)"
    )
    export.set_defaults(command=run_export)


def add_live_arguments(show: argparse.ArgumentParser) -> None:
    """What ``experts show`` needs without a file."""
    _add_role(show, default="decode")
    show.add_argument(
        "--seconds",
        type=_seconds,
        default=LIVE_SECONDS,
        metavar="S",
        help="of a running cluster, at most (default: %(default)g)",
    )
    add_cluster_arguments(show)


def run_record(arguments: argparse.Namespace) -> int:
    """Record, and say what there is."""
    from router.pool.expert_recording import Wanted, passes_of_a_window

    out: Path = arguments.out
    if not out.parent.is_dir():
        raise ConfigError("--out", str(out), "its folder does not exist", "one that does")
    passes = arguments.passes or 0
    size = passes_of_a_window(passes or 32, is_per_pass=arguments.per_pass)
    wanted = Wanted(passes_per_window=size, num_windows=passes // size, seconds=arguments.seconds)
    trace = record_cluster(arguments, wanted)
    trace.save(out)
    num_passes, tokens = trace.num_rows * trace.passes_per_row, int(trace.tokens_N.sum())
    print(f"{out}: {num_passes:,} passes in {trace.num_rows:,} rows, {tokens:,} tokens")
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Write the sums."""
    from experts.trace import load_trace

    text = json.dumps(describe_sums(load_trace(arguments.trace)))
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return 0


def describe_sums(trace: ExpertTrace) -> dict[str, Any]:
    """A trace summed over its passes, for other programs."""
    return {
        "model": trace.model_name,
        "role": trace.role,
        "num_ranks": trace.num_ranks,
        "num_draft_layers": trace.num_draft_layers,
        "num_tokens": int(trace.tokens_N.sum()),
        "logical_count": trace.counts_NLE.sum(axis=0).tolist(),
    }


def record_live(arguments: argparse.Namespace) -> ExpertTrace:
    """What running workers do just now, pass by pass."""
    from router.pool.expert_recording import Wanted

    wanted = Wanted(num_windows=LIVE_PASSES, seconds=arguments.seconds)
    return record_cluster(arguments, wanted)


def record_cluster(arguments: argparse.Namespace, wanted: Wanted) -> ExpertTrace:
    """Record the cluster that the arguments choose; Ctrl-C ends it with what there is.

    Raises:
        ClusterError: none runs, a rank cannot be recorded, or there was nothing to record.
        WrongArgumentError: no such worker.
    """
    run_dir = chosen_run_dir(arguments)
    state, credentials = running_state(run_dir), run_credentials(run_dir)
    from deploy.clients.expert_recording import instances_to_record, record
    from deploy.views.pool_watch import fetch_members

    async def run() -> ExpertTrace:
        members = await fetch_members(
            state.control_address, state.endpoint, credentials, timeout_s=_MEMBERS_TIMEOUT_S
        )
        instances = instances_to_record(members, Role(arguments.role), arguments.worker)
        until = asyncio.Event()
        with _ended_by_interrupt(until):
            return await record(instances, credentials, wanted, until=until, on_progress=_tell)

    return asyncio.run(run())


@contextlib.contextmanager
def _ended_by_interrupt(until: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, until.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _tell(recorded: Recorded) -> None:
    """Say on a terminal how much there is."""
    if sys.stderr.isatty():
        line = f"\r{recorded.num_rows:,} rows, {recorded.num_tokens:,} tokens"
        print(line, end="", file=sys.stderr, flush=True)


def _add_role(parser: argparse.ArgumentParser, *, default: str) -> None:
    roles = (Role.PREFILL.value, Role.DECODE.value)
    parser.add_argument(
        "--role", choices=roles, default=default, help="whose experts (default: %(default)s)"
    )
    parser.add_argument(
        "--worker", default="", metavar="INSTANCE", help="one alone (default: all of the role)"
    )


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of passes. Fix: 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time. Fix: more than 0 seconds")
    return value
