"""One instance as the controller runs it: its processes, what they say, how they come back.

An instance is READY when all its ranks are in the router's registry under a new epoch (the router:
when it answers ready). One dead rank is a dead instance: the others are killed and all start again,
after a pause that doubles with every failure and is forgotten after a minute of service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deploy.errors import ClusterError
from deploy.hosts.places import Place
from deploy.plan import (
    InstancePlan,
    ProcessSpec,
    Role,
    RunContext,
    log_path,
    process_name,
    process_specs,
)
from deploy.running.child import LogPiece, read_log
from deploy.running.launcher import Launcher, Supervisor, SupervisorLostError, Waiting
from deploy.state import Phase, ProcessState
from deploy.views.log_lines import last_stage
from deploy.views.pool_watch import PoolMembers

_CHAINS = ("The above exception was", "During handling of the above")
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_STABLE_AFTER_S = 60.0
_STOP_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A process that ended without being asked to by us."""

    process: str
    exit_status: int | None
    """None: its supervisor was lost with it."""
    log_path: str
    """With the host, where that is another one."""
    last_lines: tuple[str, ...] = ()
    """The end of its log; empty where nobody is left to read it."""
    why: str = ""
    """What is known of the loss of its supervisor."""

    @property
    def is_orderly(self) -> bool:
        """Whether somebody else told it to stop, as an update does, and it left in order."""
        return self.exit_status == 0

    def __str__(self) -> str:
        if self.exit_status is None:
            reason = f" ({self.why.partition(chr(10))[0]})" if self.why else ""
            return f"{self.process} was lost with its supervisor{reason}"
        if self.exit_status < 0:
            return f"{self.process} was ended by signal {-self.exit_status}"
        return f"{self.process} ended with status {self.exit_status}"

    def log_tail(self, num_lines: int = 8) -> str:
        """The end of its log, indented, for a person: tracebacks are left to the log itself."""
        lines = without_tracebacks(self.last_lines)[-num_lines:]
        return "\n".join(f"    {line}" for line in lines) or "    (its log is empty)"


@dataclass(slots=True)
class _Rank:
    spec: ProcessSpec
    supervisor: Supervisor
    place: Place
    pid: int = 0
    exit_status: int | None = None
    stage: str = ""


@dataclass(slots=True)
class Instance:
    """All processes of one ``plan``. Its methods must not run at the same time as each other."""

    plan: InstancePlan
    context: RunContext
    launcher: Launcher
    phase: Phase = Phase.STARTING
    num_restarts: int = 0
    is_set_aside: bool = False
    """Somebody drained it: it takes nothing, and is not started again when it ends."""
    _ranks: list[_Rank] = field(default_factory=list)
    _former_epochs: set[int] = field(default_factory=set)
    _waiting: str = ""
    """What it waits for while it has no room."""
    _gives_back_room: bool = False
    _num_failures: int = 0
    _ready_since: float = 0.0

    async def start(self) -> None:
        """Start every rank.

        Raises:
            ClusterError: there is no room for them, or they cannot be started.
        """
        # What served before comes back as soon as there is room, whoever makes it.
        wait = Waiting(tell=self._tell_waiting, is_patient=self.num_restarts > 0)
        placement = await self.launcher.place(self.plan, wait)
        places = placement.places
        specs = process_specs(self.plan, self.context, places)
        supervisors = await placement.start(specs)
        started = zip(specs, supervisors, places.ranks, strict=True)
        self._ranks = [_Rank(*one) for one in started]
        self._waiting = ""

    async def adopt(self, num_restarts: int) -> bool:
        """Take over the processes of a controller that is gone; whether all of them run.

        ``num_restarts`` is what that controller had counted.
        """
        running = await self.launcher.adopt(self.plan)
        self._ranks = [_Rank(one.spec, one.supervisor, one.place) for one in running]
        self.num_restarts = num_restarts
        return bool(running)

    async def poll(self) -> Death | None:
        """Take in what the processes said; the first that died, if any."""
        deaths = await asyncio.gather(*(self._poll_rank(rank) for rank in self._ranks))
        return next((death for death in deaths if death is not None), None)

    def update_phase(self, members: PoolMembers, *, router_ready: bool) -> None:
        """Become READY when the router's side says so."""
        if self.phase in (Phase.STARTING, Phase.RESTARTING) and self._serves(
            members, router_ready=router_ready
        ):
            self.phase = Phase.READY
            self._ready_since = time.monotonic()

    def pause_before_restart(self, members: PoolMembers, death: Death | None = None) -> float:
        """Note a death, or a start that failed; how many seconds to wait before ``restart``."""
        is_stable = time.monotonic() - self._ready_since > _STABLE_AFTER_S
        if self.phase is Phase.READY and (is_stable or (death is not None and death.is_orderly)):
            self._num_failures = 0
        self.phase = Phase.RESTARTING
        self.num_restarts += 1
        self._num_failures += 1
        self._former_epochs |= set(_epochs_of(members, self.plan.name).values())
        return float(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._num_failures - 1)))

    def successor(self, plan: InstancePlan, context: RunContext, members: PoolMembers) -> Instance:
        """What takes its place on purpose, under its name; what ``members`` has of it is not it."""
        return Instance(
            plan,
            context,
            self.launcher,
            phase=Phase.RESTARTING,
            num_restarts=self.num_restarts + 1,
            _former_epochs=self._former_epochs | set(_epochs_of(members, plan.name).values()),
        )

    async def read_log(self, rank: int, offset: int, limit: int) -> LogPiece:
        """Part of the log of a rank, wherever it runs; see ``child.read_log``.

        Raises:
            ClusterError: it does not run now, and its log is on another host.
        """
        if not self._ranks:
            return read_log(log_path(self.plan, rank, self.context), offset, limit)
        one = self._ranks[rank]
        try:
            return await one.supervisor.read_log(offset, limit)
        except SupervisorLostError as error:
            where = f"{one.place.host}:{one.spec.log_path}"
            raise ClusterError(
                f"cannot read {where}: {error}. It is there when the host is back"
            ) from error

    async def wait_ended(self, timeout_s: float, hurry: asyncio.Event) -> None:
        """Let the ranks end by themselves, less long when ``hurry`` is set."""
        deadline = time.monotonic() + timeout_s
        while not hurry.is_set() and time.monotonic() < deadline:
            await self.poll()
            if all(rank.exit_status is not None for rank in self._ranks):
                break
            await asyncio.sleep(_STOP_POLL_S)

    async def kill(self) -> None:
        """End what still runs, at once."""
        ranks, self._ranks = self._ranks, []
        await asyncio.gather(*(rank.supervisor.kill() for rank in ranks))
        if self._gives_back_room:
            self._gives_back_room = False
            await self.launcher.release(self.plan)

    async def stop(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Let the processes drain for at most ``grace_s`` seconds, less when ``hurry`` is set."""
        self.phase = Phase.STOPPING
        await asyncio.gather(*(rank.supervisor.terminate() for rank in self._ranks))
        await self.wait_ended(grace_s, hurry)
        self._gives_back_room = True  # nobody else of it needs that
        await self.kill()
        self.phase = Phase.STOPPED

    def process_states(self) -> list[ProcessState]:
        """The processes as people see them, also those between two lives."""
        return [self._process_state(rank) for rank in range(self.plan.num_ranks)]

    def _process_state(self, index: int) -> ProcessState:
        rank = self._ranks[index] if self._ranks else None
        return ProcessState(
            name=process_name(self.plan, index),
            role=self.plan.role.value,
            instance=self.plan.name,
            rank=index,
            phase=self.phase,
            pid=rank.pid if rank is not None and rank.exit_status is None else 0,
            stage=rank.stage if rank is not None else self._waiting,
            num_restarts=self.num_restarts,
            log_path=rank.spec.log_path if rank else str(log_path(self.plan, index, self.context)),
            host=rank.place.host if rank is not None and rank.place.folder else "",
            config_path=str(self.context.config_path),
        )

    def _serves(self, members: PoolMembers, *, router_ready: bool) -> bool:
        if self.plan.role is Role.ROUTER:
            return router_ready
        epochs = _epochs_of(members, self.plan.name)
        ranks = self.plan.registering_ranks
        return bool(self._ranks) and all(
            rank in epochs and epochs[rank] not in self._former_epochs for rank in ranks
        )

    async def _poll_rank(self, rank: _Rank) -> Death | None:
        if rank.exit_status is not None:
            return None
        try:
            report = await rank.supervisor.poll()
        except SupervisorLostError as error:
            rank.exit_status = -9
            self._gives_back_room = True
            return self._death(rank, None, why=str(error))
        rank.pid = report.pid
        rank.stage = last_stage(report.lines) or rank.stage
        if report.exit_status is None:
            return None
        rank.exit_status = report.exit_status
        return self._death(rank, report.exit_status, last_lines=report.last_lines)

    def _death(
        self,
        rank: _Rank,
        exit_status: int | None,
        *,
        last_lines: tuple[str, ...] = (),
        why: str = "",
    ) -> Death:
        place = rank.place
        return Death(
            process=rank.spec.name,
            exit_status=exit_status,
            log_path=f"{place.host}:{rank.spec.log_path}" if place.folder else rank.spec.log_path,
            last_lines=last_lines,
            why=why,
        )

    def _tell_waiting(self, what: str) -> None:
        self._waiting = what


def _epochs_of(members: PoolMembers, instance: str) -> Mapping[int, int]:
    return {rank: member.epoch for (name, rank), member in members.items() if name == instance}


def without_tracebacks(lines: Sequence[str]) -> list[str]:
    """``lines`` with each Python traceback cut down to the exception that ends it."""
    kept = []
    inside = False
    for line in lines:
        if line.startswith("Traceback (most recent call last):"):
            inside = True
        elif inside and line.startswith(" "):
            continue
        elif line.strip() and not line.startswith(_CHAINS):
            inside = False
            kept.append(line)
    return kept
