"""The seam between the controller and whatever puts processes on machines.

The controller knows instances and their supervisors; ``deploy.ray_launcher`` is the implementation
that places them with Ray. One supervisor looks after one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deploy.child import ChildReport
from deploy.plan import InstancePlan, ProcessSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is free."""

    num_instances: int
    why: str
    """What there is, for people: "4 of 8 GPUs are free"."""


class Supervisor(Protocol):
    """Looks after one started process, on the machine where it runs."""

    async def poll(self) -> ChildReport:
        """The news since the last call.

        Raises:
            SupervisorLostError: the supervisor itself is gone, and its process with it.
        """

    async def terminate(self) -> None:
        """Ask the process to drain and end; returns at once. A lost supervisor is no error."""

    async def kill(self) -> None:
        """End the process at once and release its place. A lost supervisor is no error."""


class Launcher(Protocol):
    """Starts instances."""

    async def launch(
        self, plan: InstancePlan, specs: tuple[ProcessSpec, ...]
    ) -> tuple[Supervisor, ...]:
        """Start all ranks of an instance, in parallel; one supervisor per spec, in their order.

        Raises:
            ClusterError: there is no place for them, or the first of them cannot be executed.
        """

    async def release(self, plan: InstancePlan) -> None:
        """Give back the place of an instance that has ended for good, if it had one."""

    async def room_for(self, plan: InstancePlan) -> Room:
        """How many more instances like ``plan`` have a place now."""


class SupervisorLostError(Exception):
    """A supervisor does not answer any more; the kernel has ended its process."""
