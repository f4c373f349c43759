"""Shows a starting cluster: a live table on a terminal, plain lines elsewhere.

Both show the same ``ClusterState``, read from the controller in this process or from the state file
of one in the background.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deploy.checks.posture import Port
from deploy.state import ClusterState, Phase, ProcessState, known_run_dirs
from deploy.views.log_lines import shortened

_PROGRESS = re.compile(r"(?P<what>.+) (?P<share>\d+)% \((?P<detail>.+)\)")
"""How `engine.weights.progress` tells of long work in a log."""
_PHASE_WIDTH = _BAR_WIDTH = 10
_STYLES = {
    Phase.STARTING: "yellow",
    Phase.READY: "green",
    Phase.RESTARTING: "yellow",
    Phase.DRAINED: "cyan",
    Phase.STOPPING: "cyan",
    Phase.STOPPED: "dim",
    Phase.FAILED: "red",
}


class StartDisplay:
    """A context manager; feed it with ``update``, and say ``finish`` when the cluster is ready."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._shown: dict[str, tuple[Phase, str]] = {}
        self._finished = False
        self._state: ClusterState | None = None
        self._live: Live | None = None
        if console.is_terminal:
            # Drawn anew by a thread of its own: the seconds go on while the caller is busy.
            self._live = Live(console=console, transient=True, get_renderable=self._table)

    def __enter__(self) -> StartDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """From now on only changes of phase are told, line by line."""
        self._finished = True
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """One line of its own."""
        line = f"[{self._elapsed_s():5.1f} s] {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def update(self, state: ClusterState) -> None:
        """Show what changed."""
        if self._live is not None:
            self._state = state
            self._live.refresh()
        for process in state.processes:
            news = (process.phase, "" if self._finished else process.stage)
            former = self._shown.get(process.name)
            self._shown[process.name] = news
            if self._live is not None:
                continue
            if former is None or news[0] is not former[0] or (news[1] and news != former):
                self.note(f"{process.name:<12} {process.phase.value:<10} {news[1]}".rstrip())

    def _table(self) -> RenderableType:
        if self._state is None:
            return ""
        return _table(self._state, self._elapsed_s(), self._console.width)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started


def _table(state: ClusterState, elapsed_s: float, width: int) -> Table:
    """A row for each instance, with a bar where it tells how far it is."""
    num_ready = sum(process.phase is Phase.READY for process in state.processes)
    total = max(1, len(state.processes))
    instances: dict[str, list[ProcessState]] = {}
    for process in state.processes:
        instances.setdefault(process.instance, []).append(process)
    names = [_instance_name(name, ranks) for name, ranks in instances.items()]
    name_width = max(map(len, [state.name, *names]))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, min_width=name_width)
    table.add_column(no_wrap=True, min_width=_PHASE_WIDTH)
    table.add_column(no_wrap=True, min_width=_BAR_WIDTH)
    table.add_column(no_wrap=True, overflow="ellipsis")
    left = max(20, width - name_width - _PHASE_WIDTH - _BAR_WIDTH - 8)
    for name, ranks in zip(names, instances.values(), strict=True):
        bar, text = _progress_of(ranks)
        table.add_row(name, phase_text(ranks[0].phase), bar, Text(shortened(text, left)))
    bar = ProgressBar(total=total, completed=num_ready, width=_BAR_WIDTH)
    table.add_row(state.name, "", bar, f"{num_ready} of {total} ready, {elapsed_s:.0f} s")
    return table


def _instance_name(name: str, ranks: Sequence[ProcessState]) -> str:
    return name if len(ranks) == 1 else f"{name} ({len(ranks)} ranks)"


def _progress_of(ranks: Sequence[ProcessState]) -> tuple[RenderableType, str]:
    """A bar and words of the rank that tells progress; else the words of the first that speaks."""
    for rank in ranks:
        if found := _PROGRESS.fullmatch(rank.stage):
            bar = ProgressBar(total=100, completed=int(found["share"]), width=_BAR_WIDTH)
            return bar, f"{found['what']} {found['share']}%, {found['detail']}"
    return "", next((rank.stage for rank in ranks if rank.stage), "")


def phase_text(phase: Phase) -> Text:
    """The phase in its colour."""
    return Text(phase.value, style=_STYLES[phase])


def ready_message(state: ClusterState, choice: str = "") -> str:
    """What a person needs next: the endpoint, and lines to try that work as they stand.

    ``choice`` is what ``choice_of`` says.
    """
    body = f'{{"model": "{state.model}", "prompt": "def fibonacci(n):", "max_tokens": 64}}'
    curl = f"curl --cacert {shlex.quote(state.ca)}" if state.ca else "curl"
    if state.asks_for_keys:
        curl += ' -H "Authorization: Bearer $TANDEM_API_KEY"'
    return (
        f"Ready in {state.ready_s:.1f} s: {state.model} at {state.where}\n\n"
        f"  {curl} {state.endpoint}/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f'  {own_command()} generate{choice} "def fibonacci(n):"\n'
        f"  {own_command()} status{choice}\n"
    )


def choice_of(state: ClusterState) -> str:
    """What a command needs to mean this cluster: nothing while no other runs here."""
    others = [run_dir for run_dir in known_run_dirs() if run_dir.log_dir != Path(state.log_dir)]
    is_alone = not any(run_dir.is_owned() for run_dir in others)
    return "" if is_alone else f" --name {shlex.quote(state.name)}"


def posture_table(ports: Sequence[Port]) -> Table:
    """Who reaches the ports of a cluster, and what stops strangers there."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("port", "listens on", "reached from", "asks for", "to protect it"):
        table.add_column(title, overflow="fold")
    for port in ports:
        style = "red" if port.is_open else ""
        protection = Text(port.protection, style=style)
        table.add_row(port.name, port.where, Text(port.reach, style=style), protection, port.advice)
    return table


def own_command() -> str:
    """How a person calls ``tandem`` from here: it may be in an environment that is not active."""
    if shutil.which("tandem"):
        return "tandem"
    installed = Path(sys.executable).with_name("tandem")
    if not installed.exists():
        return f"{sys.executable} -m deploy"
    return os.path.relpath(installed) if installed.is_relative_to(Path.cwd()) else str(installed)
