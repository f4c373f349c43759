"""The actor that supervises one child process under Ray, and how the controller calls it.

Ray carries specs and reports, never requests or tensors. Errors of Ray become ours here.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from deploy.child import Child, ChildReport
from deploy.errors import ClusterError
from deploy.launcher import SupervisorLostError
from deploy.plan import ProcessSpec
from deploy.ports import free_port

_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorFacts:
    """What an actor finds where Ray has put it."""

    node: str
    devices: tuple[str, ...]
    """The GPUs that are its own."""


class ChildActor:
    """The body of the actor: a ``Child`` behind calls.

    Ray runs the methods of such an actor on its main thread, which ends with the actor, and the
    child with it.
    """

    def __init__(self) -> None:
        self._child: Child | None = None

    def look_around(self) -> ActorFacts:
        """Where this runs, and what it was given."""
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return ActorFacts(node=context.get_node_id(), devices=tuple(gpus))

    def free_port(self, host: str) -> int:
        """See ``checks.free_port``: a port of this machine."""
        return free_port(host)

    def start(self, spec: ProcessSpec) -> int:
        """Start the process; its pid."""
        self._child = Child(spec)
        return self._child.pid

    def poll(self) -> ChildReport:
        """See ``Child.poll``."""
        assert self._child is not None
        return self._child.poll()

    def terminate(self) -> None:
        """See ``Child.terminate``."""
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        """See ``Child.kill``."""
        if self._child is not None:
            self._child.kill()


class RaySupervisor:
    """Calls one ``ChildActor``."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    async def look_around(self) -> ActorFacts:
        """See ``ChildActor.look_around``; waits until Ray has started the actor.

        Raises:
            ClusterError: Ray cannot start it.
        """
        facts: ActorFacts = await self._call(self._actor.look_around, "an actor")
        return facts

    async def free_port(self, host: str) -> int:
        """See ``ChildActor.free_port``.

        Raises:
            ClusterError: that host has no such address.
        """
        port: int = await self._call(self._actor.free_port, "a port", host)
        return port

    async def start(self, spec: ProcessSpec) -> None:
        """Start the process.

        Raises:
            ClusterError: the command cannot be executed.
        """
        await self._call(self._actor.start, spec.name, spec)

    async def poll(self) -> ChildReport:
        """See ``Supervisor.poll``."""
        try:
            report: ChildReport = await self._actor.poll.remote()
        except self._ray.exceptions.RayError as error:
            raise SupervisorLostError(str(error)) from error
        return report

    async def terminate(self) -> None:
        """See ``Supervisor.terminate``."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            await self._actor.terminate.remote()

    async def kill(self) -> None:
        """See ``Supervisor.kill``."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            await self._actor.kill.remote()
            self._ray.kill(self._actor)

    async def _call(self, method: Any, what: str, *arguments: object) -> Any:
        exceptions = self._ray.exceptions
        try:
            return await asyncio.wait_for(method.remote(*arguments), _START_TIMEOUT_S)
        except TimeoutError:
            problem = f"Ray has not started {what} within {_START_TIMEOUT_S:g} s"
            raise ClusterError(f"{problem}; `ray status` says how its hosts are") from None
        except exceptions.RayTaskError as error:
            raise ClusterError(f"cannot execute {what}: {error.cause}") from error
        except exceptions.RayError as error:
            raise ClusterError(f"Ray could not start {what}: {error}") from error
