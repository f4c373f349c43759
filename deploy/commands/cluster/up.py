"""``tandem up [CONFIG]``: start a cluster and run it here, or in the background."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

import deploy
from deploy.checkpoint.model_folder import with_model
from deploy.checks.early import check_named_files
from deploy.commands.common import add_command, add_config_arguments, chosen_config, settings_of
from deploy.errors import ClusterError
from deploy.state import ClusterState, Phase, RunDir, run_dir_of
from deploy.views.display import (
    StartDisplay,
    choice_of,
    own_command,
    posture_table,
    ready_message,
)
from runtime.config import ClusterConfig
from runtime.config.file import load_config
from runtime.logging import configure_logging

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_STATE_POLL_S = 0.1
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 70.0


_EXAMPLES = """
tandem up                                    # the bundled model on this CPU
tandem up ./my-model --port 9000
tandem up ORG/NAME@REVISION                  # of Hugging Face, downloaded first
tandem up cluster.toml --set decode.instances=2 --set decode.dp=8
tandem up --detach                           # returns when ready; tandem down stops it
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``up``."""
    parser = add_command(
        commands,
        "up",
        help="start a cluster on this machine",
        description="Start router, prefill and decode workers, and keep them running. "
        "deploy/configs/default.toml lists every field that a CONFIG or --set may have.",
        examples=_EXAMPLES,
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--detach", action="store_true", help="return when ready; the cluster goes on"
    )
    parser.add_argument(
        "--load-format",
        metavar="FORMAT",
        help='instead of model.load_format; "dummy" is random weights of the right shapes',
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=_START_TIMEOUT_S,
        metavar="SECONDS",
        help="give up when not ready by then (default: %(default)g)",
    )
    # The controller that --detach leaves behind is this same command, silent.
    # Its working directory is another one: DIR is where relative paths start.
    parser.add_argument("--in-background", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Start the cluster in the way that was asked for."""
    if arguments.load_format is not None:
        arguments.settings.append(f"model.load_format={arguments.load_format}")
    config = chosen_config(arguments, base=arguments.in_background)
    run_dir = run_dir_of(config.cluster.name, config.cluster.run_dir)
    if run_dir.read_state() is None:  # else it may be taken over, as it was started
        check_named_files(config)
        config = with_model(config, weights=True)
    from deploy.run import prepare

    resolved = prepare(config, run_dir)
    if arguments.in_background is not None:
        configure_logging("controller")
        return _run_silent(resolved, run_dir, arguments.timeout)
    if arguments.detach:
        arguments.settings += [f"model.path={config.model.path}", f"model.name={config.model.name}"]
        return _run_detached(run_dir, arguments)
    with run_dir.controller_log_path.open("w", encoding="utf-8") as log:
        configure_logging("controller", stream=log)
        return _run_here(resolved, run_dir, arguments.timeout)


def _run_here(config: ClusterConfig, run_dir: RunDir, timeout_s: float) -> int:
    from deploy.run import run_cluster

    console = Console()
    with contextlib.ExitStack() as stack:
        display = stack.enter_context(StartDisplay(console))
        display.note(_starting_line(config))
        ready = False

        def show(state: ClusterState) -> None:
            nonlocal ready
            if state.phase is Phase.READY and not ready:
                ready = True
                display.finish()
                message = ready_message(state, choice_of(state))
                console.print(message, markup=False, highlight=False, soft_wrap=True)
                console.print("Ctrl-C stops the cluster.")
                _print_posture(console, config)
            display.update(state)

        run_cluster(config, run_dir, on_state=show, timeout_s=timeout_s)
    console.print("stopped")
    return 0


def _run_silent(config: ClusterConfig, run_dir: RunDir, timeout_s: float) -> int:
    from deploy.run import run_cluster

    run_cluster(config, run_dir, on_state=lambda _: None, timeout_s=timeout_s)
    return 0


def _run_detached(run_dir: RunDir, arguments: argparse.Namespace) -> int:
    console = Console()
    command = [sys.executable, "-m", "deploy", "up", "--in-background", str(Path.cwd())]
    command += ["--timeout", str(arguments.timeout)]
    command += [str(arguments.config.resolve())] if arguments.config else []
    for setting in settings_of(arguments):
        command += ["--set", setting]
    with run_dir.controller_log_path.open("wb") as log:
        controller = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=Path(deploy.__file__).resolve().parents[1],
            start_new_session=True,
        )
    try:
        state = _wait_until_settled(run_dir, controller, console)
    except KeyboardInterrupt:
        console.print("stopping")
        _terminate(controller)
        raise
    if state.phase is Phase.FAILED:
        controller.wait(_STOP_TIMEOUT_S)
        run_dir.clear_state()
        raise ClusterError(state.error)
    choice = choice_of(state)
    console.print(ready_message(state, choice), markup=False, highlight=False, soft_wrap=True)
    stop = f"{own_command()} down{choice}"
    line = f"It runs in the background; `{stop}` stops it."
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    # The controller's own: it has chosen the ports that were left open.
    _print_posture(console, load_config(run_dir.config_path))
    return 0


def _print_posture(console: Console, config: ClusterConfig) -> None:
    from deploy.checks.posture import posture_of
    from router.keys.source import asks_for_keys

    console.print()
    ports = posture_of(config, has_keys=asks_for_keys(config))
    console.print(posture_table(ports), highlight=False)


def _wait_until_settled(
    run_dir: RunDir, controller: subprocess.Popen[bytes], console: Console
) -> ClusterState:
    """Show progress until the controller is ready or has failed."""
    with StartDisplay(console) as display:
        display.note(f"starting in the background, pid {controller.pid}")
        while True:
            ended = controller.poll() is not None
            state = run_dir.read_state()
            if state is not None and state.pid == controller.pid:
                display.update(state)
                if state.phase in (Phase.READY, Phase.FAILED):
                    return state
            if ended:
                log = run_dir.controller_log_path.read_text(encoding="utf-8", errors="replace")
                raise ClusterError(f"the controller ended while starting:\n{log.strip()}")
            time.sleep(_STATE_POLL_S)


def _terminate(controller: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(controller.pid, signal.SIGTERM)
    controller.wait(_STOP_TIMEOUT_S)


def _starting_line(config: ClusterConfig) -> str:
    prefill, decode = config.prefill, config.decode
    number = config.router.instances
    routers = "router" if number == 1 else f"{number} routers"
    axis = prefill.ranks_field.removeprefix("prefill.")
    return (
        f"starting {config.cluster.name}: {routers}, {prefill.instances} prefill x "
        f"{axis} {prefill.num_ranks} "
        f"({prefill.device}), {decode.instances} decode x dp {decode.dp} ({decode.device}), "
        f"model {config.model.name}"
    )
