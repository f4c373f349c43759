"""A cluster of fake roles with a real controller, for commands: no Ray, a thread of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from deploy.control.events import Event, read_events
from deploy.controller import Controller
from deploy.plan import Role, RunContext
from deploy.state import ClusterState, Phase, ProcessState, RunDir
from runtime.config import ClusterConfig
from runtime.config.file import dump_config
from tests.deploy.fakes import LocalLauncher, fake_context
from tests.waiting import wait_until


class ControlledCluster:
    """A controller, the processes it told of, and its run directory, which commands find."""

    def __init__(
        self,
        config: ClusterConfig,
        folder: Path,
        *,
        room: int = 100,
        entrypoints: Mapping[Role, tuple[str, ...]] | None = None,
        start_s: float = 120.0,
    ) -> None:
        context = fake_context(config, folder)
        if entrypoints is not None:
            context = _with_entrypoints(context, entrypoints)
        self.context = context
        self.run_dir = RunDir(context.config_path.parent)
        self.launcher = LocalLauncher(room)
        self.history: list[dict[str, ProcessState]] = []
        """By process; one entry a change."""
        self._start_s = start_s
        self._state = ClusterState(
            name=config.cluster.name,
            run_id=context.run_id,
            pid=1,
            phase=Phase.STARTING,
            endpoint=context.endpoint,
            control_address=context.control_address,
            model=config.model.name,
            started=time.time(),
            log_dir=str(context.log_dir),
        )

    @contextmanager
    def running(self) -> Iterator[ControlledCluster]:
        """Ready inside the block, stopped after it."""
        self.run_dir.write_secret(self.context.credentials.secret)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        with self.run_dir.locked():
            controller = asyncio.run_coroutine_threadsafe(self._make(), loop).result(60)
            run = asyncio.run_coroutine_threadsafe(controller.run(), loop)
            try:
                wait_until(
                    lambda: self._state.phase is Phase.READY or run.done(), "ready", self._start_s
                )
                yield self
            finally:
                loop.call_soon_threadsafe(controller.request_stop)
                run.result(120)
                loop.call_soon_threadsafe(loop.stop)
                thread.join()
                loop.close()

    async def _make(self) -> Controller:
        return Controller(
            self.context,
            self.launcher,
            on_change=self._take,
            timeout_s=self._start_s,
            grace_s=20.0,
            on_listening=self._take_address,
            events_path=self.run_dir.events_path,
        )

    def _take(self, phase: Phase, processes: Sequence[ProcessState]) -> None:
        self._publish(phase=phase, processes=tuple(processes))
        self.history.append({process.name: process for process in processes})

    def _take_address(self, address: str) -> None:
        self._publish(controller_address=address)

    def _publish(self, **changes: object) -> None:
        self._state = dataclasses.replace(self._state, **changes)  # type: ignore[arg-type]
        self.run_dir.write_state(self._state)

    @property
    def state(self) -> ClusterState:
        """As commands read it."""
        return self._state

    @property
    def processes(self) -> dict[str, ProcessState]:
        """By name, now."""
        return {process.name: process for process in self._state.processes}

    @property
    def config_file(self) -> str:
        """For `--config`."""
        return str(self.context.config_path)

    def names(self, role: str) -> list[str]:
        """The instances of a role, sorted."""
        return sorted({one.instance for one in self.processes.values() if one.role == role})

    def pids(self) -> dict[str, int]:
        """By process."""
        return {name: process.pid for name, process in self.processes.items()}

    def events(self) -> list[Event]:
        """All that were written."""
        return read_events(self.run_dir.events_path)

    def write(self, config: ClusterConfig) -> str:
        """A file with ``config``; its path."""
        path = self.run_dir.path.parent / "wanted.toml"
        path.write_text(dump_config(config), encoding="utf-8")
        return str(path)


def _with_entrypoints(
    context: RunContext, entrypoints: Mapping[Role, tuple[str, ...]]
) -> RunContext:
    return dataclasses.replace(context, entrypoints=entrypoints)
