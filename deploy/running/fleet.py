"""The instances of a cluster: which there are, who is at work on each, and what becomes of it.

An instance is either settled, and then the controller starts it again when it dies; or it comes
back from a death; or an operation holds it (``held``), and nobody else touches it. Members come and
go while the cluster serves; none of that disturbs the others.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deploy.control.events import EventKind, EventLog
from deploy.errors import ClusterError, WrongArgumentError
from deploy.plan import InstancePlan, Role, RunContext, plan_instances
from deploy.running.child import LogPiece
from deploy.running.instance import Death, Instance
from deploy.running.launcher import Launcher
from deploy.state import Phase, ProcessState
from deploy.views.pool_watch import PoolMember, PoolWatch
from runtime.config.file import load_config
from runtime.errors import ConfigError
from runtime.logging import fields, get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTimes:
    """How long members may take, in seconds."""

    start_s: float
    """Until an instance serves that joins a cluster which serves."""
    grace_s: float
    """For processes that were told to end, before they are killed."""


@dataclass(slots=True)
class Fleet:
    """All instances of one run. One event loop owns it."""

    context: RunContext
    """Of what starts from now on; an instance keeps its own until it is restarted on purpose."""
    launcher: Launcher
    watch: PoolWatch
    events: EventLog
    times: FleetTimes
    publish: Callable[[], None] = lambda: None
    """Called when an operation begins or ends its work on an instance."""
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: nobody is waited for any more."""
    instances: list[Instance] = field(default_factory=list)
    _revivals: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _held: set[str] = field(default_factory=set)
    _launching: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        plans = plan_instances(self.context.config)
        self.instances = [Instance(plan, self.context, self.launcher) for plan in plans]

    @property
    def settled(self) -> list[Instance]:
        """Those that nobody is at work on."""
        busy = self._held | set(self._revivals)
        return [one for one in self.instances if one.plan.name not in busy]

    def of_role(self, role: Role) -> list[Instance]:
        """The instances of ``role``, oldest first."""
        return [one for one in self.instances if one.plan.role is role]

    def serving(self, role: Role) -> list[Instance]:
        """Those of ``role`` that take requests."""
        return [
            one
            for one in self.of_role(role)
            if one.phase is Phase.READY and not one.is_set_aside and not self._is_draining(one)
        ]

    def find(self, name: str) -> Instance:
        """The instance of that name.

        Raises:
            WrongArgumentError: there is none.
        """
        for instance in self.instances:
            if instance.plan.name == name:
                return instance
        guests = sorted({owner for owner, _ in self.watch.members})
        known = dict.fromkeys([*(one.plan.name for one in self.instances), *guests])
        names = ", ".join(known) or "none"
        raise WrongArgumentError(f"there is no instance {name!r}. Fix: one of {names}")

    def process_states(self) -> list[ProcessState]:
        """All processes as people see them."""
        return [state for one in self.instances for state in one.process_states()]

    async def read_log(self, process: str, offset: int, limit: int) -> LogPiece:
        """Part of the log of a process, on whatever host; see ``child.read_log``.

        Raises:
            WrongArgumentError: there is no such process.
            ClusterError: its host does not answer.
        """
        for instance in self.instances:
            for state in instance.process_states():
                if state.name == process:
                    return await instance.read_log(state.rank, offset, limit)
        names = ", ".join(state.name for state in self.process_states())
        raise WrongArgumentError(f"there is no process {process!r}. Fix: one of {names}")

    def half_drained(self) -> list[Instance]:
        """Those that take nothing new although nobody set them aside."""
        return [
            one
            for one in self.instances
            if one.phase is Phase.READY and not one.is_set_aside and self._is_draining(one)
        ]

    def plan_of(self, role: Role, name: str) -> InstancePlan:
        """What an instance of ``role`` is in the present configuration."""
        plans = [plan for plan in plan_instances(self.context.config) if plan.role is role]
        same = next((plan for plan in plans if plan.name == name), plans[0])
        return dataclasses.replace(same, name=name)

    def free_names(self, role: Role, count: int) -> list[str]:
        """The next ``count`` names that nobody has, here or in the router's pool."""
        taken = {one.plan.name for one in self.instances}
        taken |= {name for name, _ in self.watch.members}
        names: list[str] = []
        index = 0
        while len(names) < count:
            name = f"{role.value}-{index}"
            if name not in taken:
                names.append(name)
            index += 1
        return names

    # While the cluster serves by itself.

    async def start_all(self) -> None:
        """Start every instance, all at once."""
        # Room is asked for in this order: what needs most of one host, while hosts are empty.
        by_size = sorted(self.instances, key=lambda one: -max(one.plan.num_ranks_by_host))
        await asyncio.gather(*(instance.start() for instance in by_size))

    async def take_over(self, former: Sequence[ProcessState]) -> None:
        """Be the instances of a controller that is gone, which may have other names than planned;
        adopt those that run, and bring back the others.
        """
        found = {one.instance: one for one in former}
        self.instances = [
            Instance(
                self.plan_of(Role(one.role), name), self._context_of(one.config_path), self.launcher
            )
            for name, one in found.items()
        ]
        for instance in self.instances:
            name = instance.plan.name
            if found[name].phase in (Phase.DRAINED, Phase.STOPPED):
                instance.is_set_aside, instance.phase = True, Phase.DRAINED
            if await instance.adopt(found[name].num_restarts):
                logger.info("took over %s", fields(instance=name))
            else:
                self.revive(instance)

    def _context_of(self, path: str) -> RunContext:
        """Of what was started with the configuration in that file; the present one without it."""
        if path in ("", str(self.context.config_path)):
            return self.context
        try:
            config = load_config(Path(path))
        except ConfigError as error:
            logger.warning("%s", error)
            return self.context
        return dataclasses.replace(self.context, config=config, config_path=Path(path))

    async def poll(self) -> list[tuple[Instance, Death]]:
        """Read the news of all that are settled, and return who died."""
        instances = self.settled
        ready = await asyncio.gather(*(self.answers(instance) for instance in instances))
        deaths = await asyncio.gather(*(instance.poll() for instance in instances))
        died = []
        for instance, death, is_ready in zip(instances, deaths, ready, strict=True):
            if instance.plan.name in self._held:  # since we asked: its holder sees for itself
                continue
            if death is None:
                instance.update_phase(self.watch.members, router_ready=is_ready)
            else:
                died.append((instance, death))
        return died

    async def answers(self, instance: Instance) -> bool:
        """Whether ``instance`` is a router that is awaited and answers ready."""
        if not awaits_router(instance):
            return False
        return await self.watch.is_ready(self.context.endpoints[instance.plan.index])

    def revive(self, instance: Instance, death: Death | None = None) -> None:
        """Start again what died, after a pause; what was set aside stays down."""
        name = instance.plan.name
        if death is not None:
            self.events.add(EventKind.DEATH, str(death), instance=name)
        if instance.is_set_aside:
            logger.warning("%s; it was drained, and stays down", death)
            self._revivals[name] = asyncio.create_task(self._lay_down(instance))
            return
        pause_s = instance.pause_before_restart(self.watch.members, death)
        if death is not None:
            logger.warning("%s; restarting %s", death, fields(pause_s=pause_s))
        self._revivals[name] = asyncio.create_task(self._bring_back(instance, death, pause_s))

    def reap(self) -> None:
        """Take note of revivals that have ended."""
        for name in [name for name, task in self._revivals.items() if task.done()]:
            self._revivals.pop(name).result()

    async def close(self) -> None:
        """Stop bringing anything back."""
        for task in self._revivals.values():
            task.cancel()
        await asyncio.gather(*self._revivals.values(), return_exceptions=True)

    async def stop_all(self, roles: frozenset[Role]) -> None:
        """End the instances of ``roles``, all at once."""
        instances = [one for one in self.instances if one.plan.role in roles]
        await asyncio.gather(*(one.stop(self.times.grace_s, self.hurry) for one in instances))

    # For operations.

    @asynccontextmanager
    async def held(self, instances: Sequence[Instance]) -> AsyncIterator[None]:
        """In the block only the caller touches ``instances``; afterwards they are settled."""
        names = {one.plan.name for one in instances}
        self._held |= names
        try:
            for name in names:
                if (task := self._revivals.pop(name, None)) is not None:
                    if name not in self._launching:  # a launch that is broken off leaves half
                        task.cancel()
                    await asyncio.wait({task})
            yield
        finally:
            self._held -= names
            self.publish()

    async def _bring_back(self, instance: Instance, death: Death | None, pause_s: float) -> None:
        if death is not None and death.is_orderly:
            # The other ranks leave with it, and have answers to deliver.
            await instance.wait_ended(self.times.grace_s, self.hurry)
        await instance.kill()
        name = instance.plan.name
        while True:
            await asyncio.sleep(pause_s)
            self._launching.add(name)
            try:
                await instance.start()
                break
            except ClusterError as error:
                logger.warning("%s", error)
            finally:
                self._launching.discard(name)
            if name in self._held:
                return
            pause_s = instance.pause_before_restart(self.watch.members)
        logger.info("restarted %s", fields(instance=name))
        self.events.add(EventKind.RESTARTED, f"started again after {pause_s:g} s", instance=name)

    async def _lay_down(self, instance: Instance) -> None:
        await instance.wait_ended(self.times.grace_s, self.hurry)
        await instance.kill()
        instance.phase = Phase.STOPPED

    def _is_draining(self, instance: Instance) -> bool:
        return any(member.draining for member in self._members_of(instance))

    def _members_of(self, instance: Instance) -> list[PoolMember]:
        name = instance.plan.name
        return [member for (owner, _), member in self.watch.members.items() if owner == name]


def awaits_router(instance: Instance) -> bool:
    """Whether only the router's HTTP side can say that it serves."""
    return instance.plan.role is Role.ROUTER and instance.phase is not Phase.READY
