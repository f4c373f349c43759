"""The seam between the controller and whatever puts processes on machines.

The controller knows instances and their supervisors; ``deploy.ray.launcher`` is the implementation
that places them with Ray. An instance is placed first; the command lines of its processes follow
from where they run. One supervisor looks after one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deploy.hosts.places import Place, Places
from deploy.plan import InstancePlan, ProcessSpec
from deploy.ports import free_port
from deploy.running.child import ChildReport, LogPiece
from runtime.net.credentials import join_address


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

    async def read_log(self, offset: int, limit: int) -> LogPiece:
        """Part of the process's log, from the machine where it runs; see ``child.read_log``.

        Raises:
            SupervisorLostError: the supervisor does not answer.
        """

    async def terminate(self) -> None:
        """Ask the process to drain and end; returns at once. A lost supervisor is no error."""

    async def kill(self) -> None:
        """End the process at once and release its place. A lost supervisor is no error."""


class Placement(Protocol):
    """The room that one instance has, and has for itself until it is released."""

    @property
    def places(self) -> Places:
        """Where each rank is to run."""

    async def start(self, specs: tuple[ProcessSpec, ...]) -> tuple[Supervisor, ...]:
        """Start all ranks, in parallel; one supervisor per spec, in their order.

        Raises:
            ClusterError: the first of them that cannot be executed.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A process that runs already, started for a controller that is gone."""

    spec: ProcessSpec
    place: Place
    supervisor: Supervisor


class Launcher(Protocol):
    """Finds places for instances and starts them there."""

    async def place(self, plan: InstancePlan, wait: Waiting) -> Placement:
        """Find room for all ranks of an instance; what it had before, unless that was released.

        Raises:
            ClusterError: there is none, for longer than ``wait`` has patience.
        """

    async def release(self, plan: InstancePlan) -> None:
        """Give back the room of an instance, whose processes have ended or are lost."""

    async def room_for(self, plan: InstancePlan) -> Room:
        """How many more instances like ``plan`` have a place now."""

    async def adopt(self, plan: InstancePlan) -> tuple[Running, ...]:
        """All ranks of an instance that runs already; empty where not all of them do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How to wait for room."""

    tell: Callable[[str], None]
    """Hears what is lacking."""
    is_patient: bool = False
    """Until there is room, however long that takes."""


class SupervisorLostError(Exception):
    """A supervisor does not answer any more; the kernel has ended its process."""


def places_here(plan: InstancePlan, host: str, advertise: str = "") -> Places:
    """Places for all ranks of ``plan`` on this machine, at its address ``host``.

    Raises:
        ConfigError: ``host`` is no address of this machine.
    """
    ranks = tuple(
        Place(bind=host, advertise=advertise, local_rank=rank) for rank in range(plan.num_ranks)
    )
    return Places(ranks=ranks, rendezvous=join_address(advertise or host, free_port(host)))
