"""Makes a cluster that runs like a configuration: scales, and rolls what reads what changed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.checks.cluster import check_config, checked_keys
from deploy.control.difference import (
    FieldChange,
    check_can_change,
    difference,
    rolled_roles,
)
from deploy.control.events import Event, EventKind
from deploy.control.members import start_members, stop_members
from deploy.control.operation import Operation, Request
from deploy.control.plans import (
    WORKER_ROLES,
    OperationPlan,
    Prepared,
    check_room,
    devices_of,
    ratio_of,
    sizes_after,
)
from deploy.control.restart import roll
from deploy.control.scale import choose_leaving
from deploy.control.settings import adopt, forget_unused, keep_size, resolved_like
from deploy.errors import RefusedError, WrongArgumentError
from deploy.plan import Role, num_devices_needed, plan_instances
from deploy.running.fleet import Fleet
from deploy.running.instance import Instance
from runtime.config import ClusterConfig
from runtime.config.file import parse_config
from runtime.parsing import parse_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyWish:
    """What was asked for."""

    config: str
    """TOML, whole, without secrets."""
    allow_gap: bool
    deadline_s: float
    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Application:
    """What an apply will do."""

    fleet: Fleet
    wanted: ClusterConfig
    changes: tuple[FieldChange, ...]
    starting: dict[Role, list[str]]
    leaving: dict[Role, list[Instance]]
    rolling: list[Instance]
    deadline_s: float

    async def carry_out(self, operation: Operation) -> str:
        """Scale, then roll; where that fails, what starts from then on starts as before."""
        fleet, deadline_s = self.fleet, self.deadline_s
        if not (self.changes or self.rolling or self.starting or self.leaving):
            return "nothing differs"
        former = fleet.context.config
        adopt(fleet, self.wanted)
        try:
            for role, names in self.starting.items():
                await start_members(fleet, operation, role, names)
            for instances in self.leaving.values():
                await stop_members(fleet, operation, instances, deadline_s)
            await roll(fleet, operation, self.rolling, deadline_s=deadline_s)
        except BaseException:
            adopt(fleet, former)
            raise
        finally:
            for role in WORKER_ROLES:
                keep_size(fleet, role, len(fleet.of_role(role)))
            forget_unused(fleet)
        if not self.changes:
            return "the cluster is as it is wanted"
        return f"the cluster runs it: {_summary(self.changes)}"

    def plan(self, what: str) -> OperationPlan:
        """For people."""
        fleet = self.fleet
        sizes = sizes_after(fleet, {role: _count_of(self.wanted, role) for role in WORKER_ROLES})
        return OperationPlan(
            what=what,
            start=tuple(name for names in self.starting.values() for name in names),
            restart=tuple(one.plan.name for one in self.rolling),
            stop=tuple(one.plan.name for gone in self.leaving.values() for one in gone),
            changes=self.changes,
            notes=(ratio_of(sizes),),
            sizes=sizes,
            num_devices=devices_of(list(plan_instances(self.wanted))),
            num_devices_now=devices_of([one.plan for one in fleet.instances]),
        )


async def prepare_apply(fleet: Fleet, wish: ApplyWish) -> Prepared:
    """Everything that can be known before it begins.

    Raises:
        ConfigError, WrongArgumentError: a setting that cannot be, or cannot change now.
        RefusedError: there is no room, or nobody would serve meanwhile.
    """
    wanted = await asyncio.to_thread(_read, fleet, wish.config)
    changes = difference(fleet.context.config, wanted)
    check_can_change(changes)
    enough = num_devices_needed(plan_instances(wanted))
    await asyncio.to_thread(check_config, wanted, num_devices=enough)
    checked_keys(wanted)
    application = _application(fleet, wanted, changes, wish.deadline_s)
    await _check_scales(application)
    if not wish.allow_gap:
        await _check_gaps(fleet, wanted, application.rolling)
    what = f"apply {changes[0].field}" if len(changes) == 1 else f"apply {len(changes)} changes"
    return Prepared(
        plan=application.plan(what),
        request=Request(
            kind=EventKind.APPLY,
            what=f"{what}: {_summary(changes)}" if changes else what,
            who=wish.who,
            roles=frozenset(Role),
        ),
        work=application.carry_out,
    )


def prepare_finish(fleet: Fleet, interrupted: Sequence[Event], deadline_s: float) -> Prepared:
    """What makes the cluster whole after operations whose controller is gone.

    Sizes and settings become those that are wanted, and whoever was told to drain, and was not set
    aside, starts again.

    Raises:
        RefusedError: nobody of a role would be left that takes requests.
    """
    application = _application(fleet, fleet.context.config, (), deadline_s)
    gone = [one for instances in application.leaving.values() for one in instances]
    halves = [one for one in fleet.half_drained() if one not in [*gone, *application.rolling]]
    application = dataclasses.replace(application, rolling=[*application.rolling, *halves])
    what = "finish what a controller left: " + ", ".join(event.text for event in interrupted)
    return Prepared(
        plan=application.plan(what),
        request=Request(kind=EventKind.APPLY, what=what, who="", roles=frozenset(Role)),
        work=application.carry_out,
    )


def _application(
    fleet: Fleet, wanted: ClusterConfig, changes: tuple[FieldChange, ...], deadline_s: float
) -> _Application:
    more = {role: _count_of(wanted, role) - len(fleet.of_role(role)) for role in WORKER_ROLES}
    leaving = {r: choose_leaving(fleet, r, -count) for r, count in more.items() if count < 0}
    gone = [one for instances in leaving.values() for one in instances]
    return _Application(
        fleet=fleet,
        wanted=wanted,
        changes=changes,
        starting={r: fleet.free_names(r, count) for r, count in more.items() if count > 0},
        leaving=leaving,
        rolling=[one for one in _outdated(fleet, wanted) if one not in gone],
        deadline_s=deadline_s,
    )


def _read(fleet: Fleet, text: str) -> ClusterConfig:
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise WrongArgumentError(f"no valid TOML: {error}. Fix: mend that line") from error
    folder = fleet.context.config_path.parent / "tls"
    return resolved_like(parse_config(table), fleet.context.config, folder)


def _count_of(config: ClusterConfig, role: Role) -> int:
    return config.prefill.instances if role is Role.PREFILL else config.decode.instances


def _outdated(fleet: Fleet, wanted: ClusterConfig) -> list[Instance]:
    """Who was started with other values of what its role reads; also by an apply that failed."""
    return [
        one
        for one in fleet.instances
        if one.plan.role in rolled_roles(difference(one.context.config, wanted))
    ]


async def _check_scales(application: _Application) -> None:
    fleet = application.fleet
    plans = {plan.role: plan for plan in plan_instances(application.wanted)}
    for role, names in application.starting.items():
        now = len(fleet.of_role(role))
        await check_room(fleet, plans[role], len(names), f"{role.value}.instances", now)


async def _check_gaps(fleet: Fleet, wanted: ClusterConfig, rolling: list[Instance]) -> None:
    """Refuse what takes away the only one that serves, and has no room for a second."""
    plans = {plan.role: plan for plan in plan_instances(wanted)}
    for role in sorted({one.plan.role for one in rolling}):
        if role is Role.ROUTER:
            raise RefusedError(
                "router: its settings change with a restart, which ends what it cannot finish "
                "within its grace. Fix: --allow-gap, or leave [router] as it is"
            )
        room = await fleet.launcher.room_for(plans[role])
        if len(fleet.serving(role)) < 2 and not room.num_instances:
            raise RefusedError(
                f"{role.value} has one instance that serves, and there is no room for a second: "
                "requests would wait, and may fail. Fix: --allow-gap"
            )


def _summary(changes: tuple[FieldChange, ...]) -> str:
    return ", ".join(f"{one.field} {one.old!r} -> {one.new!r}" for one in changes)
