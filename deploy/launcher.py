"""The seam between the controller and whatever puts processes on machines.

The controller knows instances and their supervisors; ``deploy.ray_launcher`` is the implementation
that places them with Ray. One supervisor looks after one process.
"""

from __future__ import annotations

from typing import Protocol

from deploy.child import ChildReport
from deploy.plan import InstancePlan, ProcessSpec


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


class SupervisorLostError(Exception):
    """A supervisor does not answer any more; the kernel has ended its process."""
