"""What the probes of one life of a container say of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tests.pods.container import Container, ContainerPlan
from tests.pods.manifests import Manifest
from tests.pods.probes import Probe


@dataclass(slots=True)
class ContainerState:
    """One container of a pod, over all its lives."""

    plan: ContainerPlan
    spec: Manifest
    is_ready: bool = False
    num_restarts: int = 0
    last_end: str = ""
    """How its latest life ended, and why."""
    exit_status: int | None = None
    """Of a container that is not started again."""
    running: Container | None = None


@dataclass(slots=True)
class Watch:
    """One life of a container, and who is told of it."""

    state: ContainerState
    running: Container
    address: str
    """Of its pod."""
    on_change: Callable[[], None]
    note: Callable[[str], None]

    async def until_it_must_end(self) -> str:
        """Make the probes, for ever unless one says that its life is over: which, and why.

        Raises:
            ManifestError: a probe that cannot be made.
        """
        startup = self._probe("startupProbe")
        if startup is not None:
            await asyncio.sleep(startup.delay_s)
            while not startup.is_passed:
                await startup.make(self.running)
                if startup.has_failed:
                    return f"startup probe: {startup.trouble}"
                if not startup.is_passed:
                    await asyncio.sleep(startup.period_s)
        works = (
            self._watch_readiness(self._probe("readinessProbe")),
            self._until_dead(self._probe("livenessProbe")),
        )
        tasks = [asyncio.create_task(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def set_ready(self, is_ready: bool) -> None:
        """Say so, if that is new."""
        if self.state.is_ready != is_ready:
            self.state.is_ready = is_ready
            self.on_change()

    def _probe(self, kind: str) -> Probe | None:
        spec = self.state.spec
        return Probe(spec[kind], spec, self.address) if kind in spec else None

    async def _watch_readiness(self, probe: Probe | None) -> str:
        """Never returns."""
        if probe is None:
            self.set_ready(True)
            await asyncio.Event().wait()
            raise AssertionError("nobody sets it")
        await asyncio.sleep(probe.delay_s)
        while True:
            await probe.make(self.running)
            if probe.is_passed or probe.has_failed:
                if self.state.is_ready and probe.has_failed:
                    self.note(f"{self.state.plan.name} is not ready: {probe.trouble}")
                self.set_ready(probe.is_passed)
            await asyncio.sleep(probe.period_s)

    async def _until_dead(self, probe: Probe | None) -> str:
        if probe is None:
            await asyncio.Event().wait()
            raise AssertionError("nobody sets it")
        await asyncio.sleep(probe.delay_s)
        while True:
            await probe.make(self.running)
            if probe.has_failed:
                return f"liveness probe: {probe.trouble}"
            await asyncio.sleep(probe.period_s)
