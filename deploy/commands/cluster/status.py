"""``tandem status``: what runs, since when, under which load, how fast, in how much memory."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.commands.common import (
    add_cluster_arguments,
    add_command,
    chosen_run_dir,
    run_credentials,
    running_state,
)
from deploy.plan import Role
from deploy.state import Phase, RunDir
from deploy.views.cluster import ClusterView, ProcessView, RoleView, look_at, metrics_url
from deploy.views.display import phase_text

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_EXAMPLES = """
tandem status
tandem status --watch          # live, until Ctrl-C
tandem status --json | jq .roles.decode.kv_used
tandem status > /dev/null && echo ready
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``status``."""
    parser = add_command(
        commands,
        "status",
        help="show a running cluster",
        description="A line for each role (load, queue, share of KV blocks in use, tokens/s and "
        "time to the first token over the last seconds), one for each of several models, one for "
        "each tier of service with the targets that it met, and one for each process. Ends with 0 "
        "only while everything is ready.",
        examples=_EXAMPLES,
    )
    add_cluster_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one object, for programs")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_interval,
        const=1.0,
        default=0.0,
        metavar="S",
        help="again every S seconds (default: 1), until Ctrl-C; with --json an object a line",
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print tables; 1 when the cluster is not ready."""
    if arguments.watch:
        _watch(chosen_run_dir(arguments), arguments.watch, as_json=arguments.json)
        return 0
    view = current_view(chosen_run_dir(arguments))
    if arguments.json:
        print(json.dumps(view.describe(), indent=1))
    else:
        Console().print(render(view), crop=False)
    return 0 if view.phase is Phase.READY else 1


def _watch(run_dir: RunDir, interval_s: float, *, as_json: bool) -> None:
    """Until Ctrl-C, or until the cluster has ended."""
    console = Console()
    with contextlib.ExitStack() as stack:
        live = None
        if console.is_terminal and not as_json:
            live = stack.enter_context(Live(console=console, auto_refresh=False, screen=True))
        while True:
            view = current_view(run_dir)
            if as_json:
                print(json.dumps(view.describe()), flush=True)
            elif live is not None:
                live.update(render(view), refresh=True)
            else:
                console.print(render(view), "", crop=False)
            time.sleep(interval_s)


def current_view(run_dir: RunDir) -> ClusterView:
    """One look at the cluster of ``run_dir``.

    Raises:
        ClusterError: it does not run.
    """
    state = running_state(run_dir)
    return look_at(state, run_credentials(run_dir) if state.phase is Phase.READY else None)


def render(view: ClusterView) -> RenderableType:
    """All of it, for a terminal."""
    state = view.state
    head = Text.assemble(
        (state.name, "bold"),
        " ",
        phase_text(view.phase),
        f"  {state.model} at {state.where}",
    )
    uptime = f"up {_duration(time.time() - state.started)}"
    where = Text(f"{uptime}, logs in {state.log_dir}, metrics at {metrics_url(state.endpoint)}")
    for line in (head, where):
        line.no_wrap, line.overflow = True, "ignore"  # paths and addresses stay whole
    models = (_model_table(view), "") if view.models else ()
    tiers = (_tier_table(view), "") if view.tiers else ()
    return Group(head, where, "", _role_table(view), "", *models, *tiers, _process_table(view))


def _role_table(view: ClusterView) -> Table:
    table = _table("role", "ready", "running", "queue", "KV used", "rate", "TTFT p50", "p99")
    recent = view.recent
    for role in view.roles():
        is_router = role.role is Role.ROUTER
        table.add_row(
            role.role.value,
            f"{role.num_ready}/{role.num_instances}",
            _number(role.num_running),
            _number(role.num_waiting),
            _share(role.kv_used),
            _rate(recent.get("requests_per_s"), "requests/s") if is_router else _tokens(role),
            _seconds(recent.get("ttft_p50_s")) if is_router else "",
            _seconds(recent.get("ttft_p99_s")) if is_router else "",
        )
    return table


def _model_table(view: ClusterView) -> Table:
    """All models of the routers; the other tables are of what this cluster started."""
    table = _table("model", "served", "running", "queue", "prefill", "decode", "also called")
    for model in view.models:
        table.add_row(
            model.name,
            Text("no", style="yellow") if model.missing else "yes",
            *(str(n) for n in (model.num_running, model.num_waiting)),
            *(str(n) for n in (model.num_prefill, model.num_decode)),
            ", ".join(model.aliases),
        )
    return table


def _tier_table(view: ClusterView) -> Table:
    table = _table("tier", "running", "queue", "TTFT met", "TPOT met")
    for tier in view.tiers:
        table.add_row(
            tier.name,
            str(tier.num_requests_running),
            str(tier.num_requests_waiting),
            *(_share(tier.share_met(target)) for target in ("ttft", "tpot")),
        )
    return table


def _process_table(view: ClusterView) -> Table:
    # Of processes elsewhere nobody here knows the memory.
    spans_hosts = any(process.state.host for process in view.processes)
    memory, host = ((), ("host",)) if spans_hosts else (("memory",), ())
    loads = ("running", "waiting", "free blocks", "restarts")
    table = _table("process", *host, "state", "pid", *memory, *loads)
    for process in view.processes:
        table.add_row(
            process.state.name,
            *((process.state.host or "-",) if spans_hosts else ()),
            Text("draining", style="yellow")
            if process.is_draining
            else phase_text(process.state.phase),
            str(process.state.pid or "-"),
            *(() if spans_hosts else (_memory(process),)),
            *_load_cells(process),
            str(process.state.num_restarts),
        )
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        is_text = title in ("role", "tier", "process", "host", "state")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=True)
    return table


def _memory(process: ProcessView) -> str:
    return f"{process.memory_bytes / 2**20:.0f} MiB" if process.memory_bytes else "-"


def _load_cells(process: ProcessView) -> tuple[str, str, str]:
    member = process.member
    if member is None or member.num_total_blocks == 0:  # Registered, no load reported yet.
        return ("-", "-", "-")
    return (
        str(member.num_requests_running),
        str(member.num_requests_waiting),
        f"{member.num_free_blocks}/{member.num_total_blocks}",
    )


def _tokens(role: RoleView) -> str:
    return _rate(role.tokens_per_s, "tokens/s")


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _rate(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.1f} {unit}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _duration(seconds: float) -> str:
    """The two largest units."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no interval. Fix: 0.1 to 3600 seconds")
    return seconds
