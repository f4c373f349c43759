"""Restarts: one instance after the other, so that nobody notices, or all at once.

Where there is room, a replacement serves before the instance is drained; else the instance is
drained, ended and started again under its name while others of its role serve. An instance that is
alone, without room for a second, is refused unless a gap is allowed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.control.events import EventKind
from deploy.control.members import replace_member, restart_member
from deploy.control.operation import Operation, Request
from deploy.control.plans import OperationPlan, Prepared, devices_of, ratio_of, sizes_after
from deploy.errors import RefusedError, WrongArgumentError
from deploy.plan import Role
from deploy.running.fleet import Fleet
from deploy.running.instance import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartWish:
    """What was asked for."""

    target: str
    """A role or an instance; empty: all workers."""
    rolling: bool
    allow_gap: bool
    deadline_s: float
    who: str


async def prepare_restart(fleet: Fleet, wish: RestartWish) -> Prepared:
    """Everything that can be known before it begins.

    Raises:
        RefusedError: nobody would serve meanwhile.
        WrongArgumentError: there is no such role or instance.
    """
    instances = chosen(fleet, wish.target)
    keeps_names = wish.target not in ("", *(role.value for role in Role))
    for role in sorted({one.plan.role for one in instances}):
        await _check_gap(fleet, wish, role, instances)
    names = tuple(one.plan.name for one in instances)
    how = "rolling restart" if wish.rolling else "restart"
    what = f"{how} of {wish.target or 'all workers'}"

    async def work(operation: Operation) -> str:
        if wish.rolling:
            await roll(
                fleet,
                operation,
                instances,
                deadline_s=wish.deadline_s,
                keeps_names=keeps_names,
            )
        else:
            restarts = (restart_member(fleet, operation, x, wish.deadline_s) for x in instances)
            await asyncio.gather(*restarts)
        return f"restarted {', '.join(names)}"

    num_devices = devices_of([one.plan for one in fleet.instances])
    return Prepared(
        plan=OperationPlan(
            what=what,
            restart=names,
            notes=(ratio_of(sizes_after(fleet, {})),),
            sizes=sizes_after(fleet, {}),
            num_devices=num_devices,
            num_devices_now=num_devices,
        ),
        request=Request(
            kind=EventKind.RESTART,
            what=what,
            who=wish.who,
            roles=frozenset(one.plan.role for one in instances),
        ),
        work=work,
    )


async def roll(
    fleet: Fleet,
    operation: Operation,
    instances: Sequence[Instance],
    *,
    deadline_s: float,
    keeps_names: bool = False,
) -> None:
    """Restart ``instances`` one after the other, with the present configuration.

    Raises:
        ClusterError: one did not come back; those after it were not touched.
    """
    for instance in instances:
        if instance not in fleet.instances:  # scaled away, or replaced meanwhile
            continue
        others = [one for one in fleet.serving(instance.plan.role) if one is not instance]
        if await _has_room(fleet, instance.plan.role) and not (keeps_names and others):
            await replace_member(fleet, operation, instance, deadline_s)
        else:
            await restart_member(fleet, operation, instance, deadline_s)


def chosen(fleet: Fleet, target: str) -> list[Instance]:
    """The instances that ``target`` means, oldest first.

    Raises:
        WrongArgumentError: there is none.
    """
    if not target:
        return [*fleet.of_role(Role.PREFILL), *fleet.of_role(Role.DECODE)]
    if target in [role.value for role in Role]:
        found = fleet.of_role(Role(target))
        if found:
            return found
        raise WrongArgumentError(f"there is no {target} here. Fix: the name of an instance")
    return [fleet.find(target)]


async def _check_gap(
    fleet: Fleet, wish: RestartWish, role: Role, instances: Sequence[Instance]
) -> None:
    """Refuse what leaves a role without anybody who serves."""
    if wish.allow_gap:
        return
    serving = fleet.serving(role)
    affected = [one for one in serving if one in instances]
    if not affected:
        return
    if wish.rolling and (len(serving) > 1 or await _has_room(fleet, role)):
        return
    if not wish.rolling and len(affected) < len(serving):
        return
    if wish.rolling:
        reason = f"{role.value} has one instance that serves, and there is no room for a second"
    else:
        reason = f"all instances of {role.value} would be away at once"
    fix = "--rolling, or --allow-gap" if not wish.rolling else "--allow-gap"
    raise RefusedError(f"{reason}: requests would wait, and may fail. Fix: {fix}")


async def _has_room(fleet: Fleet, role: Role) -> bool:
    """Whether a replacement can serve before its predecessor goes; there is no second router."""
    if role is Role.ROUTER:
        return False
    return (await fleet.launcher.room_for(fleet.plan_of(role, ""))).num_instances >= 1
