"""Shows a starting cluster: a live table on a terminal, plain lines elsewhere.

Both show the same ``ClusterState``, read from the controller in this process or from the state file
of one in the background.
"""

from __future__ import annotations

import os
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

from deploy.posture import Port
from deploy.state import ClusterState, Phase

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
        return "" if self._state is None else _table(self._state, self._elapsed_s())

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started


def _table(state: ClusterState, elapsed_s: float) -> Table:
    num_ready = sum(process.phase is Phase.READY for process in state.processes)
    total = max(1, len(state.processes))
    names = [process.name for process in state.processes]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, min_width=max(map(len, [state.name, *names])))
    table.add_column(no_wrap=True, min_width=10)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for process in state.processes:
        table.add_row(process.name, phase_text(process.phase), Text(process.stage))
    bar = ProgressBar(total=total, completed=num_ready, width=10)
    table.add_row(state.name, bar, f"{num_ready} of {total} ready, {elapsed_s:.0f} s")
    return table


def phase_text(phase: Phase) -> Text:
    """The phase in its colour."""
    return Text(phase.value, style=_STYLES[phase])


def ready_message(state: ClusterState) -> str:
    """What a person needs next: the endpoint and a curl line that works."""
    body = f'{{"model": "{state.model}", "prompt": "def fibonacci(n):", "max_tokens": 64}}'
    curl = f"curl --cacert {shlex.quote(state.ca)}" if state.ca else "curl"
    return (
        f"Ready in {state.ready_s:.1f} s: {state.model} at {state.endpoint}\n\n"
        f"  {curl} {state.endpoint}/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f'  {own_command()} generate "def fibonacci(n):"\n'
    )


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
