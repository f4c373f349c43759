"""One pod from its start to its end, as a kubelet looks after it."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.pods.container import Container, ContainerPlan, Image
from tests.pods.environment import PodFacts, command_of, environment_of
from tests.pods.manifests import Manifest, ManifestError, Manifests
from tests.pods.network import Held
from tests.pods.probes import http_get
from tests.pods.volumes import lay_out
from tests.pods.watch import ContainerState, Watch

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
GRACE_S = 30.0
"""Kubernetes' own, where a pod says nothing."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlace:
    """What a pod is given by its node."""

    facts: PodFacts
    held: Held
    folder: Path
    etc: Mapping[str, str]
    hostname: str
    image: Image


@dataclass(slots=True)
class Pod:
    """A pod that runs, or did. Everything is called on the event loop of the node."""

    manifest: Manifest
    objects: Manifests
    place: PodPlace
    on_change: Callable[[], None]
    """Called whenever its readiness changes."""
    is_terminating: bool = False
    is_gone: bool = False
    error: str = ""
    """Why it cannot be run at all."""
    events: list[str] = field(default_factory=list)
    states: list[ContainerState] = field(default_factory=list)
    volumes: dict[str, Path] = field(default_factory=dict)
    """Their folders on this machine."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its name."""
        return self.place.facts.name

    @property
    def spec(self) -> Mapping[str, Any]:
        """The pod's spec."""
        spec: Mapping[str, Any] = self.manifest["spec"]
        return spec

    @property
    def is_ready(self) -> bool:
        """Whether Services send it what clients want."""
        is_up = bool(self.states) and not self.is_terminating
        return is_up and all(state.is_ready for state in self.states)

    @property
    def exit_status(self) -> int | None:
        """The worst of its containers', once none is started again."""
        ends = [state.exit_status for state in self.states]
        known = [end for end in ends if end is not None]
        return max(known) if ends and len(known) == len(ends) else None

    def start(self) -> None:
        """Begin."""
        self._tasks = [asyncio.create_task(self._run(), name=f"pod {self.name}")]

    async def _run(self) -> None:
        try:
            facts, folder = self.place.facts, self.place.folder
            self.volumes = lay_out(self.spec, folder / "volumes", self.objects, facts)
            for container in self.spec.get("initContainers") or ():
                await self._run_first(container)
            self.states = [
                ContainerState(self._plan(container), container)
                for container in self.spec["containers"]
            ]
            await asyncio.gather(*(self._keep(state) for state in self.states))
        except ManifestError as error:
            self.error = str(error)
            self._note(f"cannot be run: {error}")

    async def _run_first(self, container: Manifest) -> None:
        while True:
            running = await Container.start(self._plan(container))
            try:
                status = await running.wait()
            finally:
                await running.kill()
            if status == 0:
                return
            self._note(f"init container {container['name']} exited {status}:\n{running.tail()}")
            await asyncio.sleep(LONGEST_PAUSE_S)

    def _plan(self, container: Manifest) -> ContainerPlan:
        """What a container of this pod is.

        Raises:
            ManifestError: it cannot be one.
        """
        place = self.place
        variables = environment_of(container, place.facts, self.objects)
        security = (self.spec.get("securityContext") or {}) | (
            container.get("securityContext") or {}
        )
        folder = place.folder / container["name"]
        folder.mkdir(parents=True, exist_ok=True)
        mounts = [
            {"source": source, "target": target, "read_only": True}
            for source, target in place.image.mounts
        ]
        return ContainerPlan(
            name=container["name"],
            command=tuple(command_of(container, variables, place.image.entrypoint)),
            environment={**place.image.environment, "HOSTNAME": place.hostname, **variables},
            pause_pid=place.held.pid,
            hostname=place.hostname,
            etc=place.etc,
            etc_of_image=place.image.etc,
            mounts=tuple(mounts + self._mounts_of(container)),
            security=security,
            working_dir=container.get("workingDir", "/"),
            folder=folder,
        )

    def _mounts_of(self, container: Manifest) -> list[dict[str, Any]]:
        mounts = []
        for mount in container.get("volumeMounts") or ():
            if mount["name"] not in self.volumes:
                raise ManifestError(f"volumeMount {mount['name']!r}: no such volume")
            source = self.volumes[mount["name"]] / mount.get("subPath", "")
            read_only = bool(mount.get("readOnly"))
            mounts.append(
                {"source": str(source), "target": mount["mountPath"], "read_only": read_only}
            )
        return sorted(mounts, key=lambda mount: len(str(mount["target"])))

    async def _keep(self, state: ContainerState) -> None:
        """Start it again as often as it ends, if that is the pod's policy."""
        policy, pause_s = self.spec.get("restartPolicy", "Always"), FIRST_PAUSE_S
        while not self.is_terminating:
            state.running = running = await Container.start(state.plan)
            watch = Watch(state, running, self.place.facts.ip, self.on_change, self._note)
            watching = asyncio.create_task(self._look_after(watch))
            try:
                status = await running.wait()
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            watch.set_ready(False)
            state.last_end = f"exited {status}"
            if self.is_terminating:
                return
            is_over = policy == "Never" or (policy == "OnFailure" and status == 0)
            if status or not is_over:
                self._note(f"{state.plan.name} exited {status}:\n{running.tail()}")
            if is_over:
                state.exit_status = status
                return
            state.num_restarts += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _look_after(self, watch: Watch) -> None:
        try:
            why = await watch.until_it_must_end()
        except ManifestError as error:
            self.error = str(error)
            return
        self._note(f"{watch.state.plan.name} is killed, {why}")
        await self._end(watch.state, watch.running, time.monotonic() + self._grace_s)

    @property
    def _grace_s(self) -> float:
        return float(self.spec.get("terminationGracePeriodSeconds", GRACE_S))

    async def terminate(self) -> None:
        """Delete it: out of the Services, hooks, SIGTERM, and SIGKILL after its grace."""
        if self.is_terminating:
            return
        self.is_terminating = True
        self.on_change()
        until = time.monotonic() + self._grace_s
        await asyncio.gather(
            *(
                self._end(state, state.running, until)
                for state in self.states
                if state.running is not None and not state.running.has_ended
            )
        )
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.place.held.close()
        self.is_gone = True
        self.on_change()
        shutil.rmtree(self.place.folder / "volumes", ignore_errors=True)

    async def _end(self, state: ContainerState, running: Container, until: float) -> None:
        """The hook counts to the grace, as in Kubernetes."""
        hook = (state.spec.get("lifecycle") or {}).get("preStop")
        if hook:
            left_s = max(0.0, until - time.monotonic())
            trouble = await self._run_hook(hook, state, running, left_s)
            if trouble:
                self._note(f"preStop hook of {state.plan.name}: {trouble}")
        running.signal(signal.SIGTERM)
        while not running.has_ended and time.monotonic() < until:
            await asyncio.sleep(POLL_S)
        if not running.has_ended:
            self._note(f"{state.plan.name} did not end within its grace:\n{running.tail()}")
            await running.kill()
        state.last_end = f"exited {await running.wait()}"

    async def _run_hook(
        self, hook: Mapping[str, Any], state: ContainerState, running: Container, left_s: float
    ) -> str:
        if "exec" in hook:
            status = await running.run_inside(hook["exec"]["command"], left_s)
            return f"exit status {status}" if status else ""
        if "sleep" in hook:
            await asyncio.sleep(min(left_s, float(hook["sleep"]["seconds"])))
            return ""
        if "httpGet" in hook:
            return await http_get(hook["httpGet"], state.spec, self.place.facts.ip)
        raise ManifestError(f"preStop {hook}: not known here")

    async def kill(self) -> None:
        """No hooks, no grace: its node is gone."""
        self.is_terminating = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for state in self.states:
            if state.running is not None:
                await state.running.kill()
        self.place.held.close()
        self.is_gone = True
        self.on_change()

    def log(self, num_bytes: int = 6000) -> str:
        """The end of what its containers have said."""
        texts = [
            state.plan.log_path.read_bytes()[-num_bytes:].decode(errors="replace")
            for state in self.states
            if state.plan.log_path.exists()
        ]
        return "\n".join(texts)

    def _note(self, what: str) -> None:
        self.events.append(f"{self.name}: {what}")
