"""``tandem ranks``: who waits for whom, which rank or link is slow, and what to do."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deploy.clients.http_client import fetch_json
from deploy.commands.common import (
    add_cluster_arguments,
    add_command,
    chosen_run_dir,
    run_credentials,
    running_state,
)
from deploy.errors import ClusterError

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

SHOWN_RANKS = 16
"""Of more a line would not fit: then rows and columns of those that are waited for most."""
_TIMEOUT_S = 5.0
_EXAMPLES = """
tandem ranks
tandem ranks --worker decode-0
tandem ranks --json | jq '.[].findings[].text'
tandem ranks > /dev/null || echo a rank is slow
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``ranks``."""
    parser = add_command(
        commands,
        "ranks",
        help="show for whom ranks wait, and which are slow",
        description="A matrix for each instance of several ranks, of its last 100 steps: for what "
        "share of a step the rank of a row waits for the rank of a column. Below it what is slow, "
        "why, and what to do. Ends with 1 while a rank or a link is slow.",
        examples=_EXAMPLES,
    )
    add_cluster_arguments(parser)
    parser.add_argument("--worker", default="", metavar="INSTANCE", help="one of them alone")
    parser.add_argument("--json", action="store_true", help="a list, for programs")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print; 1 where something is slow that should not be."""
    run_dir = chosen_run_dir(arguments)
    state = running_state(run_dir)
    pictures = fetch_json(state.endpoint, "/ranks", run_credentials(run_dir), timeout_s=_TIMEOUT_S)
    wanted = [each for each in pictures if arguments.worker in ("", each["instance"])]
    if arguments.worker and not wanted:
        told = ", ".join(each["instance"] for each in pictures) or "nobody yet"
        raise ClusterError(
            f"--worker = {arguments.worker!r}: has told nothing of its waits; {told} has. Fix: the "
            "name of a decode instance of several ranks, after 100 steps one after another"
        )
    if arguments.json:
        print(json.dumps(wanted, indent=1))
    else:
        print(render(wanted))
    return int(any(found["is_fault"] for each in wanted for found in each["findings"]))


def render(pictures: Sequence[Mapping[str, Any]]) -> str:
    """All of it, for people."""
    if not pictures:
        return (
            "no instance tells of its waits: there is none of several ranks, it has not run 100 "
            "steps one after another yet, or decode.record_waits is off"
        )
    return "\n\n".join("\n".join(_lines(picture)) for picture in pictures)


def _lines(picture: Mapping[str, Any]) -> list[str]:
    shares, size = picture["wait_shares"], picture["num_ranks"]
    shown = _shown(shares, size)
    note = "" if len(shown) == size else f", the {len(shown)} of {size} that are waited for most"
    lines = [
        f"{picture['instance']}: {size} ranks, {picture['step_s'] * 1e3:.2f} ms a step; waits in % "
        f"of a step, rows wait for columns{note}",
        "      " + "".join(f"{source:>7d}" for source in shown),
    ]
    for rank in shown:
        cells = (
            "      -" if rank == source else f"{100 * shares[rank][source]:7.2f}"
            for source in shown
        )
        lines.append(f"{rank:>6d}" + "".join(cells))
    for finding in picture["findings"]:
        lines += [finding["text"], f"  {finding['advice']}"]
    return lines if picture["findings"] else [*lines, "nothing is slow"]


def _shown(shares: Sequence[Sequence[float]], size: int) -> list[int]:
    """The ranks whose rows and columns are printed, in order."""
    if size <= SHOWN_RANKS:
        return list(range(size))
    waited = sorted(range(size), key=lambda rank: -sum(row[rank] for row in shares))
    return sorted(waited[:SHOWN_RANKS])
