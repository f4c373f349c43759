"""``tandem status``: what runs, since when, under which load, in how much memory."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import time
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.commands.common import (
    add_cluster_arguments,
    chosen_run_dir,
    run_credentials,
    running_state,
)
from deploy.display import phase_text
from deploy.pool_watch import PoolMember, PoolMembers, fetch_members
from deploy.state import ClusterState, Phase, ProcessState, RunDir
from deploy.sweep import memory_of

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_POOL_TIMEOUT_S = 2.0


def add_parser(commands: Subparsers) -> None:
    """Declare ``status``."""
    parser = commands.add_parser("status", help="show a running cluster")
    add_cluster_arguments(parser)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a table; 1 when the cluster is not ready."""
    run_dir = chosen_run_dir(arguments)
    state = running_state(run_dir)
    members = _fetch(run_dir, state)
    if arguments.json:
        print(json.dumps([_describe(state, process, members) for process in state.processes]))
    else:
        _show(state, members)
    return 0 if phase_now(state) is Phase.READY else 1


def phase_now(state: ClusterState) -> Phase:
    """The cluster's phase; RESTARTING where it is READY but for a process that comes back."""
    if state.phase is Phase.READY and any(
        process.phase is not Phase.READY for process in state.processes
    ):
        return Phase.RESTARTING
    return state.phase


def _fetch(run_dir: RunDir, state: ClusterState) -> PoolMembers:
    if state.phase is not Phase.READY:
        return {}
    credentials = run_credentials(run_dir)
    return asyncio.run(
        fetch_members(state.control_address, state.endpoint, credentials, timeout_s=_POOL_TIMEOUT_S)
    )


def _describe(
    state: ClusterState, process: ProcessState, members: PoolMembers
) -> dict[str, object]:
    member = _member_of(process, members)
    return {
        **dataclasses.asdict(process),
        "cluster": state.name,
        "endpoint": state.endpoint,
        "endpoints": [state.endpoint, *state.further_endpoints],
        "memory_bytes": _memory_bytes(state, process),
        "load": dataclasses.asdict(member) if member else None,
    }


def _show(state: ClusterState, members: PoolMembers) -> None:
    console = Console()
    uptime_s = time.time() - state.started
    head = Text.assemble(
        (state.name, "bold"),
        " ",
        phase_text(phase_now(state)),
        f"  {state.model} at {state.where}",
    )
    console.print(head, soft_wrap=True)
    console.print(f"up {uptime_s:.0f} s, logs in {state.log_dir}", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for title in ("process", "state", "pid", "memory", "running", "waiting", "free blocks"):
        right = title not in ("process", "state")
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    table.add_column("restarts", justify="right")
    for process in state.processes:
        table.add_row(
            process.name,
            _state_text(process, _member_of(process, members)),
            str(process.pid or "-"),
            _megabytes(_memory_bytes(state, process)),
            *_load_cells(_member_of(process, members)),
            str(process.num_restarts),
        )
    console.print(table)


def _state_text(process: ProcessState, member: PoolMember | None) -> Text:
    if member is not None and member.draining:
        return Text("draining", style="yellow")
    return phase_text(process.phase)


def _load_cells(member: PoolMember | None) -> tuple[str, str, str]:
    if member is None or member.num_total_blocks == 0:  # Registered, no load reported yet.
        return ("-", "-", "-")
    return (
        str(member.num_requests_running),
        str(member.num_requests_waiting),
        f"{member.num_free_blocks}/{member.num_total_blocks}",
    )


def _member_of(process: ProcessState, members: PoolMembers) -> PoolMember | None:
    """Its load as the registry knows it; None for what does not serve, or is not a worker."""
    if process.phase is not Phase.READY:
        return None
    return members.get((process.instance, process.rank))


def _memory_bytes(state: ClusterState, process: ProcessState) -> int:
    """Proportional set size of a process and its children; 0 when it is gone or elsewhere."""
    if not state.is_here(process):
        return 0
    try:
        parent = psutil.Process(process.pid)
        processes = [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return 0
    return memory_of(processes)[0]


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes else "-"
